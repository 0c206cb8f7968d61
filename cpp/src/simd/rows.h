// Kernels that walk over rows: the expand of LoRA, affine changes, RMS norm, SwiGLU.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <math.h>

#include "simd/vec.h"

namespace lorafleet {
namespace LORAFLEET_ISA {
namespace {

// kTokens rows of y, kVecs vectors wide, take rank_rows rows of b, in ascending order.
template <int kTokens, int kVecs>
inline void ExpandTile(const float* h, int64_t h_stride, const float* b, int64_t stride, float* y,
                       int64_t rank_rows) {
  Vec acc[kTokens][kVecs];
  LORAFLEET_UNROLL for (int t = 0; t < kTokens; ++t) {
    LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) {
      acc[t][i] = Load(y + t * stride + i * kLanes);
    }
  }
  for (int64_t r = 0; r < rank_rows; ++r) {
    Vec br[kVecs];
    LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) br[i] = Load(b + r * stride + i * kLanes);
    LORAFLEET_UNROLL for (int t = 0; t < kTokens; ++t) {
      const Vec hr = Splat(h[t * h_stride + r]);
      LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) acc[t][i] = MulAdd(hr, br[i], acc[t][i]);
    }
  }
  LORAFLEET_UNROLL for (int t = 0; t < kTokens; ++t) {
    LORAFLEET_UNROLL for (int i = 0; i < kVecs; ++i) {
      Store(y + t * stride + i * kLanes, acc[t][i]);
    }
  }
}

template <int kTokens, int kVecs>
inline void ExpandTokens(const float* h, int64_t h_stride, const float* b, int64_t stride, float* y,
                         int64_t rank_rows, int64_t c_begin, int64_t c_end) {
  int64_t c = c_begin;
  for (; c + kVecs * kLanes <= c_end; c += kVecs * kLanes) {
    ExpandTile<kTokens, kVecs>(h, h_stride, b + c, stride, y + c, rank_rows);
  }
  for (; c + kLanes <= c_end; c += kLanes) {
    ExpandTile<kTokens, 1>(h, h_stride, b + c, stride, y + c, rank_rows);
  }
  for (; c < c_end; ++c) {
    for (int t = 0; t < kTokens; ++t) {
      float sum = y[t * stride + c];
      for (int64_t r = 0; r < rank_rows; ++r) {
        sum = MulAdd(h[t * h_stride + r], b[r * stride + c], sum);
      }
      y[t * stride + c] = sum;
    }
  }
}

void Expand(const float* h, const float* b, float* y, int64_t num_tokens, int64_t rank_rows,
            int64_t h_stride, int64_t stride, int64_t c_begin, int64_t c_end) {
  int64_t t = 0;
  for (; t + 4 <= num_tokens; t += 4) {
    ExpandTokens<4, 2>(h + t * h_stride, h_stride, b, stride, y + t * stride, rank_rows, c_begin,
                       c_end);
  }
  for (; t < num_tokens; ++t) {
    ExpandTokens<1, 8>(h + t * h_stride, h_stride, b, stride, y + t * stride, rank_rows, c_begin,
                       c_end);
  }
}

void Affine(const AffineRef* refs, int64_t num_refs, float* y, int64_t num_tokens, int64_t stride,
            int64_t c_begin, int64_t c_end) {
  int64_t c = c_begin;
  for (; c + kLanes <= c_end; c += kLanes) {
    Vec gain = {}, shift = {};
    for (int64_t i = 0; i < num_refs; ++i) {
      gain = MulAdd(Splat(refs[i].scale), Load(refs[i].gain + c), gain);
      shift = MulAdd(Splat(refs[i].scale), Load(refs[i].shift + c), shift);
    }
    for (int64_t t = 0; t < num_tokens; ++t) {
      const Vec base = Load(y + t * stride + c);
      Store(y + t * stride + c, base + MulAdd(gain, base, shift));
    }
  }
  for (; c < c_end; ++c) {
    float gain = 0.0f, shift = 0.0f;
    for (int64_t i = 0; i < num_refs; ++i) {
      gain = MulAdd(refs[i].scale, refs[i].gain[c], gain);
      shift = MulAdd(refs[i].scale, refs[i].shift[c], shift);
    }
    for (int64_t t = 0; t < num_tokens; ++t) {
      float* at = y + t * stride + c;
      *at += MulAdd(gain, *at, shift);
    }
  }
}

void RmsNorm(const float* x, const float* w, float* y, int64_t features, float eps, int64_t t_begin,
             int64_t t_end) {
  for (int64_t t = t_begin; t < t_end; ++t) {
    const float* row = x + t * features;
    float* out = y + t * features;
    Vec squares = {};
    int64_t f = 0;
    for (; f + kLanes <= features; f += kLanes) {
      squares = MulAdd(Load(row + f), Load(row + f), squares);
    }
    if (f < features) {
      const Vec rest = LoadPart(row + f, features - f);
      squares = MulAdd(rest, rest, squares);
    }
    const float inverse = 1.0f / sqrtf(Sum(squares) / static_cast<float>(features) + eps);
    for (f = 0; f < features; ++f) out[f] = row[f] * inverse * w[f];
  }
}

void SiluMul(const float* gate_up, float* y, int64_t features, int64_t t_begin, int64_t t_end) {
  for (int64_t t = t_begin; t < t_end; ++t) {
    const float* gate = gate_up + t * 2 * features;
    const float* up = gate + features;
    float* out = y + t * features;
    int64_t f = 0;
    for (; f + kLanes <= features; f += kLanes) {
      const Vec g = Load(gate + f);
      Store(out + f, g / (Splat(1.0f) + Exp(-g)) * Load(up + f));
    }
    if (f < features) {
      const Vec g = LoadPart(gate + f, features - f);
      const Vec silu = g / (Splat(1.0f) + Exp(-g)) * LoadPart(up + f, features - f);
      memcpy(out + f, &silu, (features - f) * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace LORAFLEET_ISA
}  // namespace lorafleet
