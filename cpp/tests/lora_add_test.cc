// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/lora_add.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/random.h"

namespace lorafleet {
namespace {

constexpr int64_t kPages = 12, kRows = 8, kIn = 72;

// A site of three parts with random pages, some of them partly or not at all in use. What is not in
// use is NaN: reading it would show.
struct Site {
  Site()
      : a(RandomFloats(kPages * 3 * kRows * kIn, 1)), b(RandomFloats(kPages * kRows * out(), 2)) {
    for (int64_t page = 0; page < kPages; ++page) {
      for (int64_t q = 0; q < 3; ++q) {
        used.push_back(static_cast<int32_t>((page * 5 + q * 3) % 9));
        for (int64_t j = used.back(); j < kRows; ++j) {
          for (int64_t i = 0; i < kIn; ++i) a[((page * 3 + q) * kRows + j) * kIn + i] = NAN;
          for (int64_t c = begin(q); c < ends[q]; ++c) b[(page * kRows + j) * out() + c] = NAN;
        }
      }
    }
  }
  int64_t out() const { return ends[2]; }
  int64_t begin(int64_t q) const { return q == 0 ? 0 : ends[q - 1]; }
  SitePages pages() const { return {a.data(), b.data(), used.data(), ends, 3, kRows, kIn, out()}; }

  const int64_t ends[3] = {40, 59, 87};
  std::vector<float> a, b;
  std::vector<int32_t> used;
};

struct Plan {
  std::vector<int32_t> segments, starts, ids;
  std::vector<float> scales;

  AdapterPlan view() const {
    return {static_cast<int64_t>(segments.size()) - 1, segments.data(), starts.data(), ids.data(),
            scales.data()};
  }
};

// The definition, in double precision.
std::vector<double> Reference(const Site& site, const Plan& plan, const std::vector<float>& y,
                              const std::vector<float>& x) {
  std::vector<double> result(y.begin(), y.end());
  for (size_t s = 0; s + 1 < plan.segments.size(); ++s) {
    for (int64_t t = plan.segments[s]; t < plan.segments[s + 1]; ++t) {
      for (int64_t i = plan.starts[s]; i < plan.starts[s + 1]; ++i) {
        const int64_t page = plan.ids[i];
        for (int64_t q = 0; q < 3; ++q) {
          for (int64_t j = 0; j < site.used[page * 3 + q]; ++j) {
            double h = 0;
            for (int64_t k = 0; k < kIn; ++k) {
              h += double{site.a[((page * 3 + q) * kRows + j) * kIn + k]} * x[t * kIn + k];
            }
            for (int64_t c = site.begin(q); c < site.ends[q]; ++c) {
              result[t * site.out() + c] +=
                  plan.scales[i] * h * site.b[(page * kRows + j) * site.out() + c];
            }
          }
        }
      }
    }
  }
  return result;
}

// Base rows, one page, many pages, an empty segment, one adapter twice, a long segment.
const Plan kMixed = {{0, 2, 3, 3, 8, 10, 50, 51},
                     {0, 0, 2, 3, 6, 6, 8, 9},
                     {4, 7, 1, 2, 3, 11, 4, 7, 5},
                     {1.0f, 1.0f, 2.0f, 0.5f, 1.0f, -1.0f, 0.25f, 1.0f, 1.0f}};

TEST(LoraAdd, IsTheSumOverPages) {
  const Site site;
  const int64_t tokens = 51;
  const auto x = RandomFloats(tokens * kIn, 3);
  std::vector<float> y = RandomFloats(tokens * site.out(), 4);
  const auto expected = Reference(site, kMixed, y, x);
  LoraAdd(y.data(), x.data(), site.pages(), kMixed.view());
  for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], expected[i], 2e-4) << "element " << i;
}

TEST(LoraAdd, DoesNotTouchRowsWithoutPages) {
  const Site site;
  const auto x = RandomFloats(51 * kIn, 3);
  const auto before = RandomFloats(51 * site.out(), 4);
  std::vector<float> y = before;
  LoraAdd(y.data(), x.data(), site.pages(), kMixed.view());
  for (const int64_t t : {0, 1, 8, 9}) {
    for (int64_t c = 0; c < site.out(); ++c) {
      EXPECT_EQ(y[t * site.out() + c], before[t * site.out() + c]);
    }
  }
}

TEST(LoraAdd, ARowIsTheSameAloneAndInTheBatch) {
  const Site site;
  const auto x = RandomFloats(51 * kIn, 3);
  const auto before = RandomFloats(51 * site.out(), 4);
  std::vector<float> together = before, alone = before;
  LoraAdd(together.data(), x.data(), site.pages(), kMixed.view());
  for (size_t s = 0; s + 1 < kMixed.segments.size(); ++s) {
    for (int64_t t = kMixed.segments[s]; t < kMixed.segments[s + 1]; ++t) {
      const Plan one = {{0, 1},
                        {0, kMixed.starts[s + 1] - kMixed.starts[s]},
                        {kMixed.ids.begin() + kMixed.starts[s], kMixed.ids.end()},
                        {kMixed.scales.begin() + kMixed.starts[s], kMixed.scales.end()}};
      LoraAdd(&alone[t * site.out()], &x[t * kIn], site.pages(), one.view());
    }
  }
  EXPECT_EQ(together, alone);
}

TEST(LoraAdd, ABatchOfBaseRowsIsNoWork) {
  const Site site;
  const Plan plan = {{0, 1, 3}, {0, 0, 0}, {}, {}};
  std::vector<float> y(3 * site.out(), 1.0f);
  LoraAdd(y.data(), nullptr, site.pages(), plan.view());
  EXPECT_EQ(y, std::vector<float>(3 * site.out(), 1.0f));
}

}  // namespace
}  // namespace lorafleet
