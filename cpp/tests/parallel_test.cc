// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace lorafleet {
namespace {

TEST(ParallelFor, CoversEveryIndexOnce) {
  for (const int64_t count : {0, 1, 2, 11, 12, 13, 100, 1001}) {
    for (const int64_t grain : {1, 4, 12, 48}) {
      std::vector<std::atomic<int>> visits(count);
      ParallelFor(count, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++visits[i];
      });
      for (const auto& visit : visits) EXPECT_EQ(visit, 1) << count << " by " << grain;
    }
  }
}

TEST(ParallelFor, RangesBeginAtMultiplesOfTheGrain) {
  std::atomic<bool> aligned{true};
  ParallelFor(1000, 12, [&](int64_t begin, int64_t) {
    if (begin % 12 != 0) aligned = false;
  });
  EXPECT_TRUE(aligned);
}

}  // namespace
}  // namespace lorafleet
