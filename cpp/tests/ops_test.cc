// The splitting of work: with several threads every operator gives what its kernel gives alone.
// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/ops.h"

#include <gtest/gtest.h>

#include <vector>

#include "lorafleet/kernels.h"
#include "support/random.h"

namespace lorafleet {
namespace {

TEST(Ops, LinearIsTheKernelsResultHoweverItIsSplit) {
  const int64_t features = 72, outputs = 530;
  const auto w = RandomFloats(outputs * features, 1);
  for (const int64_t tokens : {1, 7, 40, 130}) {
    const auto x = RandomFloats(tokens * features, 2);
    std::vector<float> split(tokens * outputs), whole(tokens * outputs);
    Linear(x.data(), w.data(), split.data(), tokens, features, outputs);
    kernels().linear(x.data(), w.data(), whole.data(), tokens, features, outputs, 0, outputs);
    EXPECT_EQ(split, whole) << tokens << " tokens";
  }
}

TEST(Ops, RowOperatorsAreTheKernelsResults) {
  const int64_t features = 40, tokens = 77;
  const auto x = RandomFloats(tokens * 2 * features, 3), w = RandomFloats(features, 4);
  std::vector<float> split(tokens * features), whole(tokens * features);
  RmsNorm(x.data(), w.data(), split.data(), tokens, features, 1e-6f);
  kernels().rms_norm(x.data(), w.data(), whole.data(), features, 1e-6f, 0, tokens);
  EXPECT_EQ(split, whole);
  SiluMul(x.data(), split.data(), tokens, features);
  kernels().silu_mul(x.data(), whole.data(), features, 0, tokens);
  EXPECT_EQ(split, whole);
}

TEST(Ops, NoTokensAreNoWork) {
  Linear(nullptr, nullptr, nullptr, 0, 8, 100);
  RmsNorm(nullptr, nullptr, nullptr, 0, 8, 1e-6f);
  SiluMul(nullptr, nullptr, 0, 8);
}

}  // namespace
}  // namespace lorafleet
