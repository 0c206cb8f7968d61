// Each instruction set's kernels against double-precision definitions, and the law that a row's
// result does not depend, in any bit, on the rows computed with it.
// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "support/random.h"

namespace lorafleet {
namespace {

class KernelsTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    int count;
    const Kernels* const* tables = supported_kernels(&count);
    if (GetParam() >= count) GTEST_SKIP() << "this processor has fewer instruction sets";
    table_ = tables[GetParam()];
  }

  const Kernels& k() const { return *table_; }

 private:
  const Kernels* table_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(InstructionSets, KernelsTest, testing::Values(0, 1));

// Tolerance of a float32 dot product of n terms of N(0, 1) factors: the error grows as sqrt(n).
double DotTolerance(int64_t n) {
  return 2e-6 * (1 + std::sqrt(static_cast<double>(n)));
}

TEST_P(KernelsTest, LinearIsTheMatrixProduct) {
  for (const int64_t features : {1, 7, 8, 17, 576, 640, 648, 1536, 2001}) {
    for (const int64_t tokens : {1, 2, 3, 5, 8, 9, 96}) {
      const int64_t outputs = 53;
      const auto x = RandomFloats(tokens * features, 1), w = RandomFloats(outputs * features, 2);
      std::vector<float> y(tokens * outputs, NAN);
      k().linear(x.data(), w.data(), y.data(), tokens, features, outputs, 0, outputs);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t n = 0; n < outputs; ++n) {
          double sum = 0;
          for (int64_t i = 0; i < features; ++i) {
            sum += double{x[t * features + i]} * w[n * features + i];
          }
          ASSERT_NEAR(y[t * outputs + n], sum, DotTolerance(features))
              << features << " features, " << tokens << " tokens";
        }
      }
    }
  }
}

TEST_P(KernelsTest, ALinearRowIsTheSameAloneAndInAnyBatch) {
  for (const int64_t features : {13, 576, 1536}) {
    const int64_t outputs = 101, most = 111;
    const auto x = RandomFloats(most * features, 3), w = RandomFloats(outputs * features, 4);
    std::vector<float> alone(most * outputs);
    for (int64_t t = 0; t < most; ++t) {
      k().linear(&x[t * features], w.data(), &alone[t * outputs], 1, features, outputs, 0, outputs);
    }
    for (const int64_t tokens : {2, 3, 4, 5, 6, 7, 8, 9, 15, 31, 95, 96, 97, 111}) {
      std::vector<float> y(tokens * outputs);
      k().linear(x.data(), w.data(), y.data(), tokens, features, outputs, 0, outputs);
      ASSERT_TRUE(std::equal(y.begin(), y.end(), alone.begin()))
          << features << " features, " << tokens << " tokens";
    }
  }
}

TEST_P(KernelsTest, LinearWritesOnlyItsRangeOfOutputs) {
  const int64_t features = 24, outputs = 40;
  const auto w = RandomFloats(outputs * features, 6);
  for (const int64_t tokens : {1, 4, 120}) {
    const auto x = RandomFloats(tokens * features, 5);
    std::vector<float> whole(tokens * outputs), parts(tokens * outputs, 7.0f);
    k().linear(x.data(), w.data(), whole.data(), tokens, features, outputs, 0, outputs);
    k().linear(x.data(), w.data(), parts.data(), tokens, features, outputs, 5, 18);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t n = 0; n < outputs; ++n) {
        const bool inside = n >= 5 && n < 18;
        EXPECT_EQ(parts[t * outputs + n], inside ? whole[t * outputs + n] : 7.0f);
      }
    }
  }
}

TEST_P(KernelsTest, RmsNormDividesByTheRootMeanSquare) {
  for (const int64_t features : {3, 8, 64, 577}) {
    const int64_t tokens = 5;
    const auto x = RandomFloats(tokens * features, 7), w = RandomFloats(features, 8);
    std::vector<float> y(tokens * features, NAN);
    k().rms_norm(x.data(), w.data(), y.data(), features, 1e-5f, 0, tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      double squares = 0;
      for (int64_t f = 0; f < features; ++f) squares += std::pow(double{x[t * features + f]}, 2);
      const double inverse = 1 / std::sqrt(squares / features + 1e-5);
      for (int64_t f = 0; f < features; ++f) {
        EXPECT_NEAR(y[t * features + f], x[t * features + f] * inverse * w[f], 3e-6);
      }
    }
  }
}

TEST_P(KernelsTest, SiluMulIsAccurateOverTheWholeRange) {
  // Every gate from far below the underflow of its exponential to far above the overflow.
  std::vector<float> gates;
  for (float g = -120; g <= 120; g += 0.37f) gates.push_back(g);
  for (const float g : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e38f, -1e38f}) gates.push_back(g);
  const int64_t features = static_cast<int64_t>(gates.size());
  std::vector<float> gate_up = gates;
  gate_up.resize(2 * features, 1.5f);
  std::vector<float> y(features, NAN);
  k().silu_mul(gate_up.data(), y.data(), features, 0, 1);
  for (int64_t f = 0; f < features; ++f) {
    const double g = gates[f], expected = 1.5 * g / (1 + std::exp(-g));
    EXPECT_NEAR(y[f], expected, 5e-7 * std::abs(expected) + 1e-35) << "gate " << g;
  }
}

TEST_P(KernelsTest, SiluMulRowsAreTheSameWhereverTheyStand) {
  const int64_t features = 21, tokens = 4;
  const auto gate_up = RandomFloats(tokens * 2 * features, 9);
  std::vector<float> together(tokens * features), alone(tokens * features);
  k().silu_mul(gate_up.data(), together.data(), features, 0, tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    k().silu_mul(gate_up.data(), alone.data(), features, t, t + 1);
  }
  EXPECT_EQ(together, alone);
}

TEST_P(KernelsTest, ShrinkIsAScaledProductWithAStride) {
  const int64_t features = 100, rank = 7, tokens = 6, stride = 19;
  const auto x = RandomFloats(tokens * features, 10), a = RandomFloats(rank * features, 11);
  std::vector<float> h(tokens * stride, 5.0f), alone(stride, 5.0f);
  k().shrink(x.data(), a.data(), h.data(), tokens, features, rank, stride, 0.5f);
  for (int64_t t = 0; t < tokens; ++t) {
    k().shrink(&x[t * features], a.data(), alone.data(), 1, features, rank, stride, 0.5f);
    for (int64_t r = 0; r < stride; ++r) {
      double sum = 0;
      for (int64_t i = 0; i < features && r < rank; ++i) {
        sum += double{x[t * features + i]} * a[r * features + i];
      }
      EXPECT_NEAR(h[t * stride + r], r < rank ? 0.5 * sum : 5.0, DotTolerance(features));
      EXPECT_EQ(h[t * stride + r], alone[r]);
    }
  }
}

TEST_P(KernelsTest, ExpandAddsRankRowsInOrderToItsColumns) {
  const int64_t rank = 5, columns = 150, begin = 11, end = 140;
  const auto b = RandomFloats(rank * columns, 12);
  for (const int64_t tokens : {1, 2, 4, 7}) {
    const auto h = RandomFloats(tokens * rank, 13);
    const auto before = RandomFloats(tokens * columns, 14);
    std::vector<float> y = before, alone = before;
    k().expand(h.data(), b.data(), y.data(), tokens, rank, rank, columns, begin, end);
    for (int64_t t = 0; t < tokens; ++t) {
      // Alone and in two ranges: neither the batch nor the split may show.
      for (const auto& [from, to] : {std::pair{begin, int64_t{50}}, std::pair{int64_t{50}, end}}) {
        k().expand(&h[t * rank], b.data(), &alone[t * columns], 1, rank, rank, columns, from, to);
      }
      for (int64_t c = 0; c < columns; ++c) {
        double sum = before[t * columns + c];
        for (int64_t r = 0; r < rank && c >= begin && c < end; ++r) {
          sum += double{h[t * rank + r]} * b[r * columns + c];
        }
        EXPECT_NEAR(y[t * columns + c], sum, 2e-6);
      }
    }
    EXPECT_EQ(y, alone);
  }
}

// One KV head's blocks: keys (D, 16) and values (16, D) each.
struct Blocks {
  Blocks(int64_t num_keys, int64_t head_dim) : dim(head_dim) {
    const int64_t count = (num_keys + kBlockSize - 1) / kBlockSize;
    // What lies behind the last key is whatever an earlier owner left.
    memory.assign(count * 2 * kBlockSize * dim, NAN);
    const auto random = RandomFloats(num_keys * 2 * dim, 15);
    for (int64_t b = 0; b < count; ++b) {
      keys.push_back(&memory[b * 2 * kBlockSize * dim]);
      values.push_back(&memory[(b * 2 + 1) * kBlockSize * dim]);
    }
    for (int64_t j = 0; j < num_keys; ++j) {
      for (int64_t d = 0; d < dim; ++d) {
        *const_cast<float*>(&Key(j, d)) = random[j * 2 * dim + d];
        *const_cast<float*>(&Value(j, d)) = random[(j * 2 + 1) * dim + d];
      }
    }
  }
  const float& Key(int64_t j, int64_t d) const {
    return keys[j / kBlockSize][d * kBlockSize + j % kBlockSize];
  }
  const float& Value(int64_t j, int64_t d) const {
    return values[j / kBlockSize][j % kBlockSize * dim + d];
  }

  int64_t dim;
  std::vector<float> memory;
  std::vector<const float*> keys, values;
};

TEST_P(KernelsTest, AttendIsCausalSoftmaxOverItsOwnKeys) {
  for (const int64_t dim : {8, 24, 64, 128}) {
    for (const int64_t group : {1, 3, 4}) {
      const int64_t first = 13, tokens = 9, num_keys = first + tokens;
      const Blocks blocks(num_keys, dim);
      const auto query = RandomFloats(tokens * group * dim, 16);
      std::vector<float> out(tokens * group * dim, NAN), alone(out);
      std::vector<float> scores(kScoreRows * (num_keys + kBlockSize));
      const float scale = 1 / std::sqrt(static_cast<float>(dim));
      k().attend({query.data(), group * dim, out.data(), group * dim, tokens, first, group, dim,
                  blocks.keys.data(), blocks.values.data(), scale, scores.data()});
      for (int64_t t = 0; t < tokens; ++t) {
        k().attend({&query[t * group * dim], group * dim, &alone[t * group * dim], group * dim, 1,
                    first + t, group, dim, blocks.keys.data(), blocks.values.data(), scale,
                    scores.data()});
        for (int64_t g = 0; g < group; ++g) {
          std::vector<double> p, expected(dim, 0.0);
          double total = 0;
          for (int64_t j = 0; j <= first + t; ++j) {
            double score = 0;
            for (int64_t d = 0; d < dim; ++d) {
              score += double{query[(t * group + g) * dim + d]} * blocks.Key(j, d);
            }
            p.push_back(std::exp(score * scale));
            total += p.back();
          }
          for (int64_t d = 0; d < dim; ++d) {
            for (size_t j = 0; j < p.size(); ++j) expected[d] += p[j] / total * blocks.Value(j, d);
            ASSERT_NEAR(out[(t * group + g) * dim + d], expected[d], 3e-6)
                << "head size " << dim << ", token " << t;
          }
        }
      }
      EXPECT_EQ(out, alone) << "head size " << dim << ", group " << group;
    }
  }
}

}  // namespace
}  // namespace lorafleet
