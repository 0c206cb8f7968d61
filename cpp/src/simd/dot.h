// Dot products of rows of x with rows of w: linear layers and the shrink of LoRA.
//
// A dot product is cut into chunks of K, the same for every batch size; within a chunk one vector
// accumulator runs over K, its lanes are added by Sum4, and chunks are added in ascending order.
// Tiles of several rows only share loads: they never change the sequence of one product.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lorafleet/kernels.h"
#include "simd/vec.h"

namespace lorafleet {
namespace LORAFLEET_ISA {
namespace {

// Features of a chunk at most: 8 rows of x and 3 of w then fit into a 32 KB first cache.
constexpr int64_t kMaxChunk = 640;

// Chunks of equal length, as few as possible, whole vectors.
inline int64_t ChunkLength(int64_t k_size) {
  const int64_t chunks = (k_size + kMaxChunk - 1) / kMaxChunk;
  return ((k_size + chunks - 1) / chunks + kLanes - 1) / kLanes * kLanes;
}

// One chunk of a block of dot products: out[t, n] = or += scale * sum_k x[t, k] w[n, k].
struct Dots {
  const float* x;
  int64_t x_stride;
  const float* w;
  int64_t w_stride;
  int64_t k_size;
  float scale;
  bool first;  // the chunk starts the sums
  float* out;
  int64_t out_stride;
  // Rows of w that are wanted after these: fetched while this tile computes. Memory is slow and the
  // arithmetic of a tile hides it only if the wish is stated early. `next` may be null, and may
  // lie beyond the array: a prefetch never faults.
  const float* next;
  int64_t next_stride;
};

// kTokens x kRows products; with three vectors for operands, 12 of them fill the 16 registers.
template <int kTokens, int kRows, int kNextRows>
void DotTile(const Dots& d) {
  const float *x = d.x, *w = d.w, *next = d.next;
  Vec acc[kTokens][kRows];
  LORAFLEET_UNROLL for (int t = 0; t < kTokens; ++t) {
    LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) acc[t][r] = Vec{};
  }
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vec wk[kRows];
    LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) wk[r] = Load(w + r * d.w_stride + k);
    LORAFLEET_UNROLL for (int t = 0; t < kTokens; ++t) {
      const Vec xk = Load(x + t * d.x_stride + k);
      LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) acc[t][r] = MulAdd(xk, wk[r], acc[t][r]);
    }
  };
  int64_t k = 0;
  if (next != nullptr) {
    for (; k + 2 * kLanes <= d.k_size; k += 2 * kLanes) {  // two vectors are a cache line
      LORAFLEET_UNROLL for (int r = 0; r < kNextRows; ++r) {
        __builtin_prefetch(next + r * d.next_stride + k);
      }
      step(k);
      step(k + kLanes);
    }
  }
  for (; k + kLanes <= d.k_size; k += kLanes) step(k);
  if (k < d.k_size) {
    const int64_t rest = d.k_size - k;
    LORAFLEET_UNROLL for (int t = 0; t < kTokens; ++t) {
      const Vec xk = LoadPart(x + t * d.x_stride + k, rest);
      LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) {
        acc[t][r] = MulAdd(xk, LoadPart(w + r * d.w_stride + k, rest), acc[t][r]);
      }
    }
  }
  const auto put = [&](int t, int r, float sum) __attribute__((always_inline)) {
    float* out = d.out + t * d.out_stride + r;
    *out = d.first ? sum : *out + sum;
  };
  const Vec4 scale = {d.scale, d.scale, d.scale, d.scale};
  LORAFLEET_UNROLL for (int t = 0; t < kTokens; t += 4) {
    LORAFLEET_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec4 sums = scale * Sum4(acc[t][r], t + 1 < kTokens ? acc[(t + 1) % kTokens][r] : Vec{},
                                     t + 2 < kTokens ? acc[(t + 2) % kTokens][r] : Vec{},
                                     t + 3 < kTokens ? acc[(t + 3) % kTokens][r] : Vec{});
      LORAFLEET_UNROLL for (int i = 0; i < (kTokens < 4 ? kTokens : 4); ++i) put(t + i, r, sums[i]);
    }
  }
}

// kFirst + kSecond rows of x against `rows` rows of w, kRows at a time. Packed rows of w are at
// hand already: `next` are then rows of the next panel, one for each step.
template <int kFirst, int kSecond, int kRows, bool kPacked>
void DotRows(Dots d, int64_t rows) {
  const auto step = [&]<int kWidth>() __attribute__((always_inline)) {
    constexpr int kNextRows = kPacked ? 1 : kWidth;
    DotTile<kFirst, kWidth, kNextRows>(d);
    if constexpr (kSecond > 0) {
      Dots second = d;
      second.x += kFirst * d.x_stride;
      second.out += kFirst * d.out_stride;
      if (kPacked) second.next = nullptr;
      DotTile<kSecond, kWidth, kNextRows>(second);
    }
    d.w += kWidth * d.w_stride;
    d.out += kWidth;
    if (d.next != nullptr) d.next += kNextRows * d.next_stride;
  };
  for (; rows >= kRows; rows -= kRows) step.template operator()<kRows>();
  for (; rows > 0; --rows) step.template operator()<1>();
}

// Tokens of a block: with ChunkLength features each they stay in the first cache.
constexpr int64_t kTokenBlock = 8;

// `count` <= kTokenBlock rows of x against `rows` rows of w.
template <bool kPacked>
void DotBlock(const Dots& d, int64_t count, int64_t rows) {
  switch (count) {
    case 1:
      return DotRows<1, 0, 4, kPacked>(d, rows);
    case 2:
      return DotRows<2, 0, 4, kPacked>(d, rows);
    case 3:
      return DotRows<3, 0, 3, kPacked>(d, rows);
    case 4:
      return DotRows<4, 0, 3, kPacked>(d, rows);
    case 5:
      return DotRows<3, 2, 3, kPacked>(d, rows);
    case 6:
      return DotRows<3, 3, 3, kPacked>(d, rows);
    case 7:
      return DotRows<4, 3, 3, kPacked>(d, rows);
    default:
      return DotRows<4, 4, 3, kPacked>(d, rows);
  }
}

inline int64_t Least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// out[t, n] = scale * sum_k x[t, k] w[n, k], where w has `rows` rows: for few tokens, or few rows.
inline void DotAll(const float* x, const float* w, float* out, int64_t num_tokens, int64_t k_size,
                   int64_t rows, int64_t out_stride, float scale) {
  // One token block passes over w once, a step's rows at a time, along all their features; several
  // share blocks of rows that stay in the second cache.
  const bool one_block = num_tokens <= kTokenBlock;
  const int64_t step = num_tokens <= 2 ? 4 : 3;
  const int64_t row_block = one_block ? step : 12;
  const int64_t chunk = ChunkLength(k_size);
  // A single token does so little with long rows that the processor's own prefetching keeps up.
  const bool fetch = num_tokens > 1 || k_size <= kMaxChunk;
  for (int64_t n = 0; n < rows; n += row_block) {
    const int64_t block = Least(row_block, rows - n);
    for (int64_t k = 0; k < k_size; k += chunk) {
      const float* wn = w + n * k_size + k;
      const float* next = wn + step * k_size;
      if (one_block) next = k + chunk < k_size ? wn + chunk : w + (n + step) * k_size;
      if (!fetch) next = nullptr;
      for (int64_t t = 0; t < num_tokens; t += kTokenBlock) {
        DotBlock<false>(
            {x + t * k_size + k, k_size, wn, k_size, Least(chunk, k_size - k), scale, k == 0,
             out + t * out_stride + n, out_stride, t == 0 ? next : nullptr, k_size},
            Least(kTokenBlock, num_tokens - t), block);
      }
    }
  }
}

// The same for many tokens: panels of w and blocks of x are copied together, since rows that are a
// power of two apart would fight for the same places of the caches.
inline void DotPacked(const float* x, const float* w, float* out, int64_t num_tokens,
                      int64_t k_size, int64_t rows, int64_t out_stride, float scale) {
  alignas(64) float x_block[kTokenBlock * kMaxChunk];
  alignas(64) float panel[kPanelRows * kMaxChunk];
  const int64_t chunk = ChunkLength(k_size);
  for (int64_t n = 0; n < rows; n += kPanelRows) {
    const int64_t panel_rows = Least(kPanelRows, rows - n);
    for (int64_t k = 0; k < k_size; k += chunk) {
      const int64_t kc = Least(chunk, k_size - k);
      const float* wn = w + n * k_size + k;
      for (int64_t i = 0; i < panel_rows; ++i) {
        memcpy(panel + i * chunk, wn + i * k_size, kc * sizeof(float));
      }
      // Three token blocks fetch 16 rows each of the next panel.
      const float* next = k + chunk < k_size ? wn + chunk : w + (n + kPanelRows) * k_size;
      for (int64_t t = 0; t < num_tokens; t += kTokenBlock) {
        const int64_t count = Least(kTokenBlock, num_tokens - t);
        for (int64_t i = 0; i < count; ++i) {
          memcpy(x_block + i * chunk, x + (t + i) * k_size + k, kc * sizeof(float));
        }
        DotBlock<true>({x_block, chunk, panel, chunk, kc, scale, k == 0, out + t * out_stride + n,
                        out_stride, t < 3 * kTokenBlock ? next : nullptr, k_size},
                       count, panel_rows);
        next += kPanelRows / 3 * k_size;
      }
    }
  }
}

void Linear(const float* x, const float* w, float* y, int64_t num_tokens, int64_t k_size,
            int64_t out_features, int64_t n_begin, int64_t n_end) {
  const auto dots = num_tokens < kPanelTokens ? DotAll : DotPacked;
  dots(x, w + n_begin * k_size, y + n_begin, num_tokens, k_size, n_end - n_begin, out_features,
       1.0f);
}

void Shrink(const float* x, const float* a, float* h, int64_t num_tokens, int64_t k_size,
            int64_t rank_rows, int64_t h_stride, float scale) {
  DotAll(x, a, h, num_tokens, k_size, rank_rows, h_stride, scale);
}

}  // namespace
}  // namespace LORAFLEET_ISA
}  // namespace lorafleet
