// Causal attention of a run of query tokens over blocks of keys and values.
//
// A query row (one head of one token) takes its keys in ascending order: scores over D ascending,
// two passes of softmax over exactly its own keys, values by key ascending. Tiles of several rows
// only share loads, so a row's result does not depend on how a prompt was cut.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <math.h>

#include "lorafleet/kernels.h"
#include "simd/vec.h"

namespace lorafleet {
namespace LORAFLEET_ISA {
namespace {

// Query rows of a tile: 6 x 2 accumulators, two operands and a splat are 15 of 16 registers.
constexpr int kQueryRows = kScoreRows;
static_assert(kQueryRows == 6, "Attend lists the tile heights");

// A query row of a tile, and what becomes of it.
struct QueryRow {
  const float* query;  // (D,)
  float* out;          // (D,)
  float* scores;       // (keys rounded up to a block,)
  int64_t num_keys;    // it sees keys 0 .. num_keys - 1
  float inverse_total;
};

// Scores of kRows queries against one block of keys.
template <int kRows>
inline void ScoreBlock(const QueryRow* rows, const float* keys, int64_t head_dim, float scale,
                       int64_t first_key) {
  Vec acc[kRows][2];
  LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = Vec{};
  for (int64_t d = 0; d < head_dim; ++d) {
    const Vec k0 = Load(keys + d * kBlockSize);
    const Vec k1 = Load(keys + d * kBlockSize + kLanes);
    LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec q = Splat(rows[r].query[d]);
      acc[r][0] = MulAdd(q, k0, acc[r][0]);
      acc[r][1] = MulAdd(q, k1, acc[r][1]);
    }
  }
  LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) {
    Store(rows[r].scores + first_key, acc[r][0] * Splat(scale));
    Store(rows[r].scores + first_key + kLanes, acc[r][1] * Splat(scale));
  }
}

// scores[0, num_keys) become e^(score - max); returns their sum. Scores up to the next multiple of
// kLanes are overwritten.
inline float SoftmaxNumerators(float* scores, int64_t num_keys) {
  const int64_t padded = (num_keys + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = num_keys; j < padded; ++j) scores[j] = -INFINITY;
  Vec running = Splat(-INFINITY);
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec s = Load(scores + j);
    running = Select(s > running, s, running);
  }
  const Vec top = Splat(Max(running));
  Vec sum = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec e = Exp(Load(scores + j) - top);
    sum += e;
    Store(scores + j, e);
  }
  return Sum(sum);
}

// out[d] = sum_j p[j] v[j, d] / total for kVecs vectors of features from d on.
template <int kRows, int kVecs>
inline void WeightedSum(const QueryRow* rows, const float* const* values, int64_t d,
                        int64_t head_dim) {
  Vec acc[kRows][kVecs];
  LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) {
    LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) acc[r][i] = Vec{};
  }
  // Keys that all rows see; later rows see more than earlier ones.
  const int64_t shared = rows[0].num_keys;
  for (int64_t first = 0; first < shared; first += kBlockSize) {
    const float* block = values[first / kBlockSize] + d;
    const int64_t count = shared - first < kBlockSize ? shared - first : kBlockSize;
    for (int64_t j = 0; j < count; ++j) {
      Vec v[kVecs];
      LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) {
        v[i] = Load(block + j * head_dim + i * kLanes);
      }
      LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) {
        const Vec p = Splat(rows[r].scores[first + j]);
        LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) acc[r][i] = MulAdd(p, v[i], acc[r][i]);
      }
    }
  }
  LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) {
    for (int64_t j = shared; j < rows[r].num_keys; ++j) {
      const float* v = values[j / kBlockSize] + (j % kBlockSize) * head_dim + d;
      const Vec p = Splat(rows[r].scores[j]);
      LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) {
        acc[r][i] = MulAdd(p, Load(v + i * kLanes), acc[r][i]);
      }
    }
    const Vec inverse = Splat(rows[r].inverse_total);
    LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) {
      Store(rows[r].out + d + i * kLanes, acc[r][i] * inverse);
    }
  }
}

// kRows rows in ascending order of num_keys.
template <int kRows>
void AttendRows(QueryRow* rows, const AttendSpan& span) {
  const int64_t most = rows[kRows - 1].num_keys;
  for (int64_t first = 0; first < most; first += kBlockSize) {
    ScoreBlock<kRows>(rows, span.keys[first / kBlockSize], span.head_dim, span.scale, first);
  }
  for (int r = 0; r < kRows; ++r) {
    rows[r].inverse_total = 1.0f / SoftmaxNumerators(rows[r].scores, rows[r].num_keys);
  }
  int64_t d = 0;
  for (; d + 2 * kLanes <= span.head_dim; d += 2 * kLanes) {
    WeightedSum<kRows, 2>(rows, span.values, d, span.head_dim);
  }
  if (d < span.head_dim) WeightedSum<kRows, 1>(rows, span.values, d, span.head_dim);
}

void Attend(const AttendSpan& span) {
  const int64_t last = span.first_position + span.num_tokens;
  const int64_t score_stride = (last + kBlockSize - 1) / kBlockSize * kBlockSize;
  const int64_t num_rows = span.num_tokens * span.group;
  for (int64_t row = 0; row < num_rows; row += kQueryRows) {
    const int count = num_rows - row < kQueryRows ? static_cast<int>(num_rows - row) : kQueryRows;
    QueryRow rows[kQueryRows];
    for (int r = 0; r < count; ++r) {
      const int64_t t = (row + r) / span.group, g = (row + r) % span.group;
      rows[r] = {span.query + t * span.query_stride + g * span.head_dim,
                 span.out + t * span.out_stride + g * span.head_dim, span.scores + r * score_stride,
                 span.first_position + t + 1, 0.0f};
    }
    switch (count) {
      case 1:
        AttendRows<1>(rows, span);
        break;
      case 2:
        AttendRows<2>(rows, span);
        break;
      case 3:
        AttendRows<3>(rows, span);
        break;
      case 4:
        AttendRows<4>(rows, span);
        break;
      case 5:
        AttendRows<5>(rows, span);
        break;
      default:
        AttendRows<6>(rows, span);
        break;
    }
  }
}

}  // namespace
}  // namespace LORAFLEET_ISA
}  // namespace lorafleet
