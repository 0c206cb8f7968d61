// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/adapter_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "lorafleet/lora_add.h"

namespace lorafleet {
namespace {

using Names = std::vector<std::string>;

constexpr int64_t kPages = 8, kRows = 4;

// A pool with its storage: one site of two parts, 3 -> 2 + 3, and one of a single part, 2 -> 4.
class AdapterPoolTest : public testing::Test {
 protected:
  AdapterPoolTest()
      : sites_({{3, {2, 5}}, {2, {4}}}),
        a_{std::vector<float>(kPages * 2 * kRows * 3), std::vector<float>(kPages * kRows * 2)},
        b_{std::vector<float>(kPages * kRows * 5), std::vector<float>(kPages * kRows * 4)},
        used_{std::vector<int32_t>(kPages * 2), std::vector<int32_t>(kPages)},
        pool_(sites_,
              {{a_[0].data(), b_[0].data(), used_[0].data()},
               {a_[1].data(), b_[1].data(), used_[1].data()}},
              kPages, kRows) {}

  ~AdapterPoolTest() override { EXPECT_TRUE(pool_.Check().ok()); }

  void Load(const std::string& version, int64_t num_pages) {
    ASSERT_TRUE(pool_.Reserve(version, num_pages).ok());
    ASSERT_TRUE(pool_.Commit(version).ok());
  }

  ErrorKind ReserveError(const std::string& version, int64_t num_pages) {
    const auto result = pool_.Reserve(version, num_pages);
    EXPECT_FALSE(result.ok());
    return result.ok() ? ErrorKind::kInternal : result.error().kind();
  }

  std::vector<PoolSite> sites_;
  std::vector<float> a_[2], b_[2];
  std::vector<int32_t> used_[2];
  AdapterPool pool_;
};

TEST_F(AdapterPoolTest, AVersionGoesFromAbsentOverLoadingToResident) {
  ASSERT_TRUE(pool_.Reserve("v", 2).ok());
  EXPECT_EQ(pool_.Loading(), Names{"v"});
  EXPECT_EQ(pool_.free_pages(), kPages - 2);
  EXPECT_FALSE(pool_.Pin("v").has_value()) << "nobody may read a loading version";
  ASSERT_TRUE(pool_.Commit("v").ok());
  EXPECT_EQ(pool_.Residents(), Names{"v"});
  EXPECT_TRUE(pool_.Loading().empty());
  EXPECT_TRUE(pool_.Evict("v"));
  EXPECT_EQ(pool_.free_pages(), kPages);
}

TEST_F(AdapterPoolTest, AbortGivesThePagesBack) {
  ASSERT_TRUE(pool_.Reserve("v", 3).ok());
  pool_.Abort("v");
  EXPECT_EQ(pool_.free_pages(), kPages);
  EXPECT_TRUE(pool_.Loading().empty());
  pool_.Abort("v");
  pool_.Abort("never seen");
}

TEST_F(AdapterPoolTest, AbortDoesNothingToAResident) {
  Load("v", 3);
  pool_.Abort("v");
  EXPECT_EQ(pool_.Residents(), Names{"v"});
}

TEST_F(AdapterPoolTest, AVersionIsReservedOnce) {
  ASSERT_TRUE(pool_.Reserve("v", 1).ok());
  EXPECT_EQ(ReserveError("v", 1), ErrorKind::kConflict);
  ASSERT_TRUE(pool_.Commit("v").ok());
  EXPECT_EQ(ReserveError("v", 1), ErrorKind::kConflict);
  EXPECT_EQ(pool_.Commit("v").error().kind(), ErrorKind::kConflict);
}

TEST_F(AdapterPoolTest, ReserveEvictsTheLeastRecentlyPinned) {
  Load("old", 3);
  Load("new", 3);
  ASSERT_TRUE(pool_.Pin("old").has_value());
  ASSERT_TRUE(pool_.Unpin("old").ok());
  EXPECT_EQ(pool_.Residents(), (Names{"new", "old"}));
  EXPECT_EQ(pool_.Reserve("v", 3).value(), Names{"new"});
}

TEST_F(AdapterPoolTest, ReserveEvictsNoMoreThanItNeeds) {
  Load("a", 2);
  Load("b", 2);
  Load("c", 2);
  EXPECT_EQ(pool_.Reserve("v", 4).value(), Names{"a"});
  EXPECT_EQ(pool_.Residents(), (Names{"b", "c"}));
}

TEST_F(AdapterPoolTest, APinnedVersionIsNeverEvicted) {
  Load("pinned", 4);
  Load("other", 4);
  ASSERT_TRUE(pool_.Pin("pinned").has_value());
  EXPECT_FALSE(pool_.Evict("pinned"));
  EXPECT_EQ(pool_.Reserve("v", 4).value(), Names{"other"});
  EXPECT_EQ(pool_.Residents(), Names{"pinned"});
}

TEST_F(AdapterPoolTest, EachPinIsUndoneOnce) {
  Load("v", 1);
  ASSERT_TRUE(pool_.Pin("v").has_value());
  ASSERT_TRUE(pool_.Pin("v").has_value());
  ASSERT_TRUE(pool_.Unpin("v").ok());
  EXPECT_FALSE(pool_.Evict("v"));
  ASSERT_TRUE(pool_.Unpin("v").ok());
  EXPECT_EQ(pool_.Unpin("v").error().kind(), ErrorKind::kInternal);
  EXPECT_EQ(pool_.Unpin("absent").error().kind(), ErrorKind::kInternal);
  EXPECT_TRUE(pool_.Evict("v"));
}

TEST_F(AdapterPoolTest, AReserveThatCannotSucceedEvictsNothing) {
  Load("a", 3);
  Load("b", 3);
  ASSERT_TRUE(pool_.Reserve("loading", 2).ok());
  ASSERT_TRUE(pool_.Pin("b").has_value());
  EXPECT_EQ(ReserveError("v", 4), ErrorKind::kExhausted);
  EXPECT_EQ(ReserveError("v", kPages + 1), ErrorKind::kExhausted);
  EXPECT_EQ(ReserveError("v", 0), ErrorKind::kInvalidInput);
  EXPECT_EQ(pool_.Residents(), (Names{"a", "b"}));
  EXPECT_EQ(pool_.Loading(), Names{"loading"});
}

TEST_F(AdapterPoolTest, WriteSpreadsRankRowsOverPages) {
  ASSERT_TRUE(pool_.Reserve("v", 2).ok());
  const int64_t rank = 6;
  std::vector<float> a(rank * 3), b(rank * 3);
  for (int64_t i = 0; i < rank * 3; ++i) a[i] = 100 + i, b[i] = 200 + i;
  ASSERT_TRUE(pool_.Write("v", 0, 1, a.data(), b.data(), rank).ok());
  ASSERT_TRUE(pool_.Commit("v").ok());
  const auto pages = pool_.Pin("v").value();
  for (int64_t row = 0; row < rank; ++row) {
    const int64_t page = pages[row / kRows], place = row % kRows;
    for (int64_t k = 0; k < 3; ++k) {
      EXPECT_EQ(a_[0][((page * 2 + 1) * kRows + place) * 3 + k], a[row * 3 + k]);
    }
    for (int64_t c = 0; c < 3; ++c) {
      EXPECT_EQ(b_[0][(page * kRows + place) * 5 + 2 + c], b[row * 3 + c]);
    }
  }
  EXPECT_EQ(used_[0][pages[0] * 2 + 1], kRows);
  EXPECT_EQ(used_[0][pages[1] * 2 + 1], rank - kRows);
  EXPECT_EQ(used_[0][pages[0] * 2], 0) << "a part that was not written is not used";
  EXPECT_EQ(used_[1][pages[0]], 0);
}

TEST_F(AdapterPoolTest, AReusedPageForgetsItsEarlierOwner) {
  const std::vector<float> ones(kRows * 3, 1.0f);
  ASSERT_TRUE(pool_.Reserve("first", kPages).ok());
  ASSERT_TRUE(pool_.Write("first", 0, 0, ones.data(), ones.data(), kRows).ok());
  ASSERT_TRUE(pool_.Commit("first").ok());
  ASSERT_TRUE(pool_.Reserve("second", kPages).ok());
  EXPECT_EQ(used_[0], std::vector<int32_t>(kPages * 2, 0));
}

TEST_F(AdapterPoolTest, WritingASmallerRankAgainShrinksWhatIsUsed) {
  const std::vector<float> ones(2 * kRows * 3, 1.0f);
  ASSERT_TRUE(pool_.Reserve("v", 2).ok());
  ASSERT_TRUE(pool_.Write("v", 0, 0, ones.data(), ones.data(), 2 * kRows).ok());
  ASSERT_TRUE(pool_.Write("v", 0, 0, ones.data(), ones.data(), 1).ok());
  ASSERT_TRUE(pool_.Commit("v").ok());
  const auto pages = pool_.Pin("v").value();
  EXPECT_EQ(used_[0][pages[0] * 2], 1);
  EXPECT_EQ(used_[0][pages[1] * 2], 0);
}

TEST_F(AdapterPoolTest, WriteRefusesWhatDoesNotFit) {
  const std::vector<float> rows(100, 1.0f);
  ASSERT_TRUE(pool_.Reserve("v", 1).ok());
  const auto error = [&](const std::string& version, int64_t site, int64_t part, int64_t rank) {
    return pool_.Write(version, site, part, rows.data(), rows.data(), rank).error().kind();
  };
  EXPECT_EQ(error("v", 0, 0, kRows + 1), ErrorKind::kInvalidInput);
  EXPECT_EQ(error("v", 2, 0, 1), ErrorKind::kInvalidInput);
  EXPECT_EQ(error("v", -1, 0, 1), ErrorKind::kInvalidInput);
  EXPECT_EQ(error("v", 1, 1, 1), ErrorKind::kInvalidInput);
  EXPECT_EQ(error("absent", 0, 0, 1), ErrorKind::kConflict);
  ASSERT_TRUE(pool_.Commit("v").ok());
  EXPECT_EQ(error("v", 0, 0, 1), ErrorKind::kConflict) << "residents are never written";
}

TEST_F(AdapterPoolTest, AnAffineChangeTakesTheLastPageOfItsPart) {
  const std::vector<float> a(5 * 3, 1.0f), b_t(5 * 2, 2.0f), gain = {3, 4}, shift = {5, 6};
  ASSERT_TRUE(pool_.Reserve("v", 3).ok());
  ASSERT_TRUE(pool_.WriteAffine("v", 0, 0, gain.data(), shift.data()).ok());
  ASSERT_TRUE(pool_.Write("v", 0, 0, a.data(), b_t.data(), 5).ok());
  ASSERT_TRUE(pool_.Commit("v").ok());
  const auto pages = pool_.Pin("v").value();
  EXPECT_EQ(used_[0][pages[0] * 2], 4);
  EXPECT_EQ(used_[0][pages[1] * 2], 1);
  EXPECT_EQ(used_[0][pages[2] * 2], kAffinePage);
  EXPECT_EQ(used_[0][pages[2] * 2 + 1], 0) << "the other part has none";
  const float* b = &b_[0][pages[2] * kRows * 5];
  EXPECT_EQ(std::vector<float>(b, b + 2), gain);
  EXPECT_EQ(std::vector<float>(b + 5, b + 7), shift);
  EXPECT_TRUE(pool_.Unpin("v").ok());
  // The next owner of the page finds it unused.
  EXPECT_TRUE(pool_.Evict("v"));
  ASSERT_TRUE(pool_.Reserve("w", 3).ok());
  for (int64_t page = 0; page < kPages; ++page) EXPECT_EQ(used_[0][page * 2], 0);
}

TEST_F(AdapterPoolTest, RankRowsAndAnAffineChangeDoNotShareAPage) {
  const std::vector<float> a(8 * 3), b_t(8 * 2), gain(2), shift(2);
  ASSERT_TRUE(pool_.Reserve("v", 2).ok());
  ASSERT_TRUE(pool_.Write("v", 0, 0, a.data(), b_t.data(), 5).ok());
  EXPECT_FALSE(pool_.WriteAffine("v", 0, 0, gain.data(), shift.data()).ok());
  ASSERT_TRUE(pool_.Reserve("w", 2).ok());
  ASSERT_TRUE(pool_.WriteAffine("w", 0, 0, gain.data(), shift.data()).ok());
  EXPECT_FALSE(pool_.Write("w", 0, 0, a.data(), b_t.data(), 5).ok());
  EXPECT_TRUE(pool_.Write("w", 0, 0, a.data(), b_t.data(), 4).ok());
  EXPECT_FALSE(pool_.WriteAffine("w", 0, 2, gain.data(), shift.data()).ok()) << "no such part";
  EXPECT_FALSE(pool_.WriteAffine("x", 0, 0, gain.data(), shift.data()).ok()) << "not loading";
}

TEST(AdapterPoolShape, IsCheckedBeforeMemoryIsMade) {
  const auto ok = [](std::vector<PoolSite> sites, int64_t pages, int64_t rows) {
    return AdapterPool::CheckShape(sites, pages, rows).ok();
  };
  EXPECT_TRUE(ok({{4, {2, 6}}}, 1, 1));
  EXPECT_TRUE(ok({}, 1, 1));
  EXPECT_FALSE(ok({{4, {2, 6}}}, 0, 1));
  EXPECT_FALSE(ok({{4, {2, 6}}}, 1, 0));
  EXPECT_FALSE(ok({{0, {2, 6}}}, 1, 1));
  EXPECT_FALSE(ok({{4, {}}}, 1, 1));
  EXPECT_FALSE(ok({{4, {2, 2}}}, 1, 1));
  EXPECT_FALSE(ok({{4, {0, 2}}}, 1, 1));
  EXPECT_FALSE(ok({{int64_t{1} << 62, {1}}}, 4, 8));
  EXPECT_FALSE(ok({{1, {1}}}, int64_t{1} << 40, 8));
}

// Loaders write a version's own number into its pages; readers pin and check that every row they
// see is that number. A page that is given away, evicted or aborted too early would show.
TEST_F(AdapterPoolTest, ReadersNeverSeeAForeignRowWhateverTheThreadsDo) {
  constexpr int kVersions = 10;
  std::atomic<bool> stop{false};
  std::atomic<int64_t> reads{0}, loads{0};
  const auto work = [&](uint32_t seed) {
    std::mt19937 random(seed);
    while (!stop) {
      const int number = static_cast<int>(random() % kVersions);
      const std::string version = "v" + std::to_string(number);
      const int64_t num_pages = 1 + number % 3;
      const int64_t rank = num_pages * kRows - number % 2;
      switch (random() % 8) {
        case 0:
          pool_.Evict(version);
          break;
        case 1:
          EXPECT_TRUE(pool_.Check().ok());
          break;
        case 2:
        case 3:
          if (pool_.Reserve(version, num_pages).ok()) {
            const std::vector<float> rows(rank * 3, static_cast<float>(number));
            for (int part = 0; part < 2; ++part) {
              EXPECT_TRUE(pool_.Write(version, 0, part, rows.data(), rows.data(), rank).ok());
            }
            if (random() % 4 == 0) {
              pool_.Abort(version);
            } else {
              EXPECT_TRUE(pool_.Commit(version).ok());
              ++loads;
            }
          }
          break;
        default:
          if (const auto pages = pool_.Pin(version)) {
            ASSERT_EQ(static_cast<int64_t>(pages->size()), num_pages);
            for (int64_t row = 0; row < rank; ++row) {
              const int64_t page = (*pages)[row / kRows];
              ASSERT_EQ(a_[0][((page * 2 + 1) * kRows + row % kRows) * 3 + 1], number);
              ASSERT_EQ(b_[0][(page * kRows + row % kRows) * 5 + 4], number);
            }
            ++reads;
            ASSERT_TRUE(pool_.Unpin(version).ok());
          }
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 6; ++i) threads.emplace_back(work, i);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while ((reads < 2000 || loads < 500) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(reads, 2000);
  EXPECT_GE(loads, 500);
}

// An abort from another thread must not give pages away under a copy that still runs.
TEST_F(AdapterPoolTest, AbortWaitsForTheCopiesOfItsVersion) {
  const int64_t rank = kPages * kRows;
  const std::vector<float> twos(rank * 3, 2.0f);
  for (int round = 0; round < 200; ++round) {
    ASSERT_TRUE(pool_.Reserve("v", kPages).ok());
    std::thread writer([&] {
      for (int i = 0; i < 50; ++i) {
        if (!pool_.Write("v", 0, 0, twos.data(), twos.data(), rank).ok()) return;
      }
    });
    pool_.Abort("v");
    ASSERT_TRUE(pool_.Reserve("w", kPages).ok());
    EXPECT_EQ(used_[0], std::vector<int32_t>(kPages * 2, 0));
    ASSERT_TRUE(pool_.Commit("w").ok());
    ASSERT_TRUE(pool_.Evict("w"));
    writer.join();
  }
}

}  // namespace
}  // namespace lorafleet
