// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/paged_kv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "support/random.h"

namespace lorafleet {
namespace {

constexpr KvShape kShape = {
    .num_layers = 2, .num_blocks = 40, .num_qo_heads = 6, .num_kv_heads = 2, .head_dim = 16};
constexpr int64_t kDim = kShape.head_dim;
constexpr int64_t kQkv = (kShape.num_qo_heads + 2 * kShape.num_kv_heads) * kDim;
constexpr int64_t kOut = kShape.num_qo_heads * kDim;
constexpr float kScale = 0.25f;

std::vector<float> Frequencies() {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < kDim / 2; ++i) {
    frequencies.push_back(std::pow(100.0f, -2.0f * i / kDim));
  }
  return frequencies;
}

std::unique_ptr<PagedKvCache> MakeCache() {
  return std::move(PagedKvCache::Create(kShape, Frequencies())).value();
}

// One sequence of a step: its new rows of qkv, what is cached, its blocks.
struct Chunk {
  const float* qkv;
  int64_t count;
  int64_t context;
  std::vector<int32_t> blocks;
};

// Runs a step on one layer; rows in the order of the chunks.
std::vector<float> Step(PagedKvCache* cache, const std::vector<Chunk>& chunks, int64_t layer = 0) {
  std::vector<int32_t> starts = {0}, contexts, table;
  std::vector<float> qkv;
  size_t width = 0;
  for (const Chunk& chunk : chunks) width = std::max(width, chunk.blocks.size());
  for (const Chunk& chunk : chunks) {
    qkv.insert(qkv.end(), chunk.qkv, chunk.qkv + chunk.count * kQkv);
    starts.push_back(starts.back() + static_cast<int32_t>(chunk.count));
    contexts.push_back(static_cast<int32_t>(chunk.context));
    table.insert(table.end(), chunk.blocks.begin(), chunk.blocks.end());
    table.resize(contexts.size() * width, -1);  // what is not needed is not looked at
  }
  const Status begun =
      cache->BeginForward(starts.data(), contexts.data(), table.data(),
                          static_cast<int64_t>(chunks.size()), static_cast<int64_t>(width));
  EXPECT_TRUE(begun.ok());
  std::vector<float> out(starts.back() * kOut, NAN);
  EXPECT_TRUE(cache->Attention(layer, kScale, qkv.data(), out.data()).ok());
  return out;
}

// A head's vector at a position, rotated by the definition, in double precision.
std::vector<double> Rotated(const float* x, int64_t position) {
  const auto frequencies = Frequencies();
  std::vector<double> out(kDim);
  for (int64_t i = 0; i < kDim / 2; ++i) {
    const double angle = static_cast<float>(position) * frequencies[i];
    out[i] = x[i] * std::cos(angle) - x[i + kDim / 2] * std::sin(angle);
    out[i + kDim / 2] = x[i + kDim / 2] * std::cos(angle) + x[i] * std::sin(angle);
  }
  return out;
}

std::vector<double> Reference(const std::vector<float>& qkv) {
  const int64_t tokens = static_cast<int64_t>(qkv.size()) / kQkv;
  const int64_t group = kShape.num_qo_heads / kShape.num_kv_heads;
  std::vector<double> out(tokens * kOut);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < kShape.num_qo_heads; ++h) {
      const auto q = Rotated(&qkv[t * kQkv + h * kDim], t);
      std::vector<double> p;
      for (int64_t j = 0; j <= t; ++j) {
        const int64_t key = j * kQkv + (kShape.num_qo_heads + h / group) * kDim;
        const auto k = Rotated(&qkv[key], j);
        p.push_back(std::exp(kScale * std::inner_product(q.begin(), q.end(), k.begin(), 0.0)));
      }
      const double total = std::accumulate(p.begin(), p.end(), 0.0);
      for (int64_t j = 0; j <= t; ++j) {
        const float* v =
            &qkv[j * kQkv + (kShape.num_qo_heads + kShape.num_kv_heads + h / group) * kDim];
        for (int64_t d = 0; d < kDim; ++d) out[t * kOut + h * kDim + d] += p[j] / total * v[d];
      }
    }
  }
  return out;
}

TEST(PagedKvCache, AttendsCausallyAfterRotation) {
  const auto qkv = RandomFloats(70 * kQkv, 1);
  const auto cache = MakeCache();
  const auto out = Step(cache.get(), {{qkv.data(), 70, 0, {3, 0, 9, 7, 2}}}, 1);
  const auto expected = Reference(qkv);
  for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 1e-5) << i;
}

TEST(PagedKvCache, APromptInChunksIsThePromptAtOnceToTheBit) {
  const int64_t tokens = 75;
  const auto qkv = RandomFloats(tokens * kQkv, 2);
  const auto whole = Step(MakeCache().get(), {{qkv.data(), tokens, 0, {0, 1, 2, 3, 4}}});
  for (const std::vector<int64_t>& cuts :
       {std::vector<int64_t>{1, 75}, {16, 32, 75}, {37, 74, 75}}) {
    const auto cache = MakeCache();
    std::vector<float> pieces;
    int64_t at = 0;
    for (const int64_t cut : cuts) {
      const auto out = Step(cache.get(), {{&qkv[at * kQkv], cut - at, at, {11, 5, 30, 2, 17}}});
      pieces.insert(pieces.end(), out.begin(), out.end());
      at = cut;
    }
    EXPECT_EQ(pieces, whole);
  }
}

TEST(PagedKvCache, ASequenceIsTheSameAloneAndInABatchToTheBit) {
  const auto first = RandomFloats(40 * kQkv, 3), second = RandomFloats(21 * kQkv, 4),
             third = RandomFloats(33 * kQkv, 5);
  const auto batch = MakeCache(), alone = MakeCache();
  // A prompt beside a prompt; then a decode, a chunk and a fresh prompt in one step.
  const auto one =
      Step(batch.get(), {{first.data(), 39, 0, {4, 8, 6}}, {second.data(), 9, 0, {1}}});
  const auto two = Step(batch.get(), {{&first[39 * kQkv], 1, 39, {4, 8, 6}},
                                      {&second[9 * kQkv], 12, 9, {1, 12}},
                                      {third.data(), 33, 0, {20, 21, 22}}});
  std::vector<float> expected_one, expected_two;
  const auto append = [](std::vector<float>* to, const std::vector<float>& rows) {
    to->insert(to->end(), rows.begin(), rows.end());
  };
  append(&expected_one, Step(alone.get(), {{first.data(), 39, 0, {0, 1, 2}}}));
  append(&expected_two, Step(alone.get(), {{&first[39 * kQkv], 1, 39, {0, 1, 2}}}));
  append(&expected_one, Step(alone.get(), {{second.data(), 9, 0, {3, 4}}}));
  append(&expected_two, Step(alone.get(), {{&second[9 * kQkv], 12, 9, {3, 4}}}));
  append(&expected_two, Step(alone.get(), {{third.data(), 33, 0, {5, 6, 7}}}));
  EXPECT_EQ(one, expected_one);
  EXPECT_EQ(two, expected_two);
}

TEST(PagedKvCache, ARecycledBlockCarriesNothingOver) {
  const auto cache = MakeCache();
  const std::vector<float> poison(16 * kQkv, NAN);
  Step(cache.get(), {{poison.data(), 16, 0, {5}}});
  const auto qkv = RandomFloats(3 * kQkv, 6);
  EXPECT_EQ(Step(cache.get(), {{qkv.data(), 3, 0, {5}}}),
            Step(MakeCache().get(), {{qkv.data(), 3, 0, {5}}}));
}

TEST(PagedKvCache, LayersAreApart) {
  const auto a = RandomFloats(5 * kQkv, 7), b = RandomFloats(5 * kQkv, 8);
  const auto cache = MakeCache();
  Step(cache.get(), {{a.data(), 4, 0, {0}}}, 0);
  Step(cache.get(), {{b.data(), 4, 0, {0}}}, 1);
  const auto next = Step(cache.get(), {{&a[4 * kQkv], 1, 4, {0}}}, 0);
  const auto whole = Step(MakeCache().get(), {{a.data(), 5, 0, {0}}}, 0);
  EXPECT_TRUE(std::equal(next.begin(), next.end(), whole.end() - kOut));
}

TEST(PagedKvCache, SequencesShareTheBlocksOfACommonBeginning) {
  const auto prompt = RandomFloats(32 * kQkv, 9), tail = RandomFloats(2 * kQkv, 10);
  const auto cache = MakeCache();
  Step(cache.get(), {{prompt.data(), 32, 0, {0, 1}}});
  const auto both =
      Step(cache.get(), {{tail.data(), 1, 32, {0, 1, 2}}, {&tail[kQkv], 1, 32, {0, 1, 3}}});
  const auto alone = MakeCache();
  Step(alone.get(), {{prompt.data(), 32, 0, {7, 8}}});
  const auto second = Step(alone.get(), {{&tail[kQkv], 1, 32, {7, 8, 9}}});
  EXPECT_TRUE(std::equal(second.begin(), second.end(), both.begin() + kOut));
}

TEST(PagedKvCache, RefusesAShapeThatDoesNotFit) {
  const auto refused = [](KvShape shape, size_t frequencies) {
    const auto cache = PagedKvCache::Create(shape, std::vector<float>(frequencies, 1.0f));
    return !cache.ok() && cache.error().kind() == ErrorKind::kInvalidInput;
  };
  EXPECT_FALSE(refused({1, 1, 2, 1, 8}, 4));
  EXPECT_TRUE(refused({0, 1, 2, 1, 8}, 4));
  EXPECT_TRUE(refused({1, -1, 2, 1, 8}, 4));
  EXPECT_TRUE(refused({1, 1, 3, 2, 8}, 4)) << "heads do not divide";
  EXPECT_TRUE(refused({1, 1, 2, 1, 12}, 6)) << "no whole vectors";
  EXPECT_TRUE(refused({1, 1, 2, 1, 8}, 8)) << "too many frequencies";
  EXPECT_TRUE(refused({1 << 30, 1 << 30, 2, 1, 64}, 32)) << "overflow";
}

TEST(PagedKvCache, RefusesSequencesThatDoNotFitAndKeepsTheStep) {
  const auto cache = MakeCache();
  const auto qkv = RandomFloats(2 * kQkv, 11);
  Step(cache.get(), {{qkv.data(), 2, 0, {0}}});
  const auto refused = [&](std::vector<int32_t> starts, std::vector<int32_t> contexts,
                           std::vector<int32_t> table) {
    const int64_t sequences = static_cast<int64_t>(contexts.size());
    const int64_t width = sequences == 0 ? 0 : static_cast<int64_t>(table.size()) / sequences;
    const Status status =
        cache->BeginForward(starts.data(), contexts.data(), table.data(), sequences, width);
    return !status.ok() && status.error().kind() == ErrorKind::kInvalidInput;
  };
  EXPECT_TRUE(refused({0}, {}, {})) << "no sequence";
  EXPECT_TRUE(refused({1, 2}, {0}, {0})) << "does not begin with 0";
  EXPECT_TRUE(refused({0, 0}, {0}, {0})) << "no tokens";
  EXPECT_TRUE(refused({0, 2, 1}, {0, 0}, {0, 1})) << "descends";
  EXPECT_TRUE(refused({0, 1}, {-1}, {0})) << "negative context";
  EXPECT_TRUE(refused({0, 1}, {16}, {0})) << "table too short";
  EXPECT_TRUE(refused({0, 1}, {INT32_MAX}, {0})) << "context beyond everything";
  EXPECT_TRUE(refused({0, 1}, {0}, {40})) << "no such block";
  EXPECT_TRUE(refused({0, 1}, {0}, {-1})) << "negative block";
  EXPECT_EQ(cache->num_tokens(), 2) << "a refused step changes nothing";
  std::vector<float> out(2 * kOut);
  EXPECT_FALSE(cache->Attention(2, kScale, qkv.data(), out.data()).ok()) << "no such layer";
  EXPECT_FALSE(cache->Attention(-1, kScale, qkv.data(), out.data()).ok());
  EXPECT_TRUE(cache->Attention(1, kScale, qkv.data(), out.data()).ok());
}

}  // namespace
}  // namespace lorafleet
