// The inner loops, as a table of functions for the instruction set of this machine.
//
// One source (src/simd) is written in portable vector types and compiled once per
// instruction set; `kernels()` picks the best that this processor runs. All arrays are float32,
// row-major and contiguous. Every function computes each output row by the same sequence of
// operations however many rows it is given: results do not depend on the batch.
//
// Dims: T tokens, K input features, N output features, R rank rows, D head size.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lorafleet {

// One run of consecutive query tokens of one sequence, for the attention of one KV head.
struct AttendSpan {
  const float* query;          // first token's first query head of the group, after rotation
  int64_t query_stride;        // floats from one token to the next
  float* out;                  // first token's first query head of the group
  int64_t out_stride;          // floats from one token to the next
  int64_t num_tokens;          // query tokens in the run
  int64_t first_position;      // absolute position of the first one; it sees keys 0..position
  int64_t group;               // query heads that share this KV head
  int64_t head_dim;            // D, a multiple of 8
  const float* const* keys;    // per block: this head's keys, (D, 16)
  const float* const* values;  // per block: this head's values, (16, D)
  float scale;                 // multiplies query . key
  float* scores;               // scratch, kScoreRows * (number of keys rounded up to 16) floats
};

// One adapter's affine change of some columns: y += scale * (gain * y + shift).
struct AffineRef {
  const float* gain;
  const float* shift;
  float scale;
};

// Query rows that `attend` takes at once.
inline constexpr int64_t kScoreRows = 6;

// Keys are stored in blocks of this many tokens, transposed, so that one vector holds one feature
// of eight keys and scores need no horizontal sums.
inline constexpr int64_t kBlockSize = 16;

// From kPanelTokens tokens on, `linear` copies its weights in panels of kPanelRows outputs: ranges
// of outputs should be multiples of that.
inline constexpr int64_t kPanelTokens = 96;
inline constexpr int64_t kPanelRows = 48;

struct Kernels {
  const char* name;

  // y[t, n] = sum_k x[t, k] w[n, k] for n in [n_begin, n_end).
  void (*linear)(const float* x, const float* w, float* y, int64_t num_tokens, int64_t in_features,
                 int64_t out_features, int64_t n_begin, int64_t n_end);

  // y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * w for t in [t_begin, t_end).
  void (*rms_norm)(const float* x, const float* w, float* y, int64_t features, float eps,
                   int64_t t_begin, int64_t t_end);

  // y[t, f] = silu(gate_up[t, f]) * gate_up[t, F + f] for t in [t_begin, t_end).
  void (*silu_mul)(const float* gate_up, float* y, int64_t features, int64_t t_begin,
                   int64_t t_end);

  // Causal softmax attention of one span.
  void (*attend)(const AttendSpan& span);

  // h[t, r] = scale * sum_k a[r, k] x[t, k]; `h_stride` floats between tokens.
  void (*shrink)(const float* x, const float* a, float* h, int64_t num_tokens, int64_t in_features,
                 int64_t rank_rows, int64_t h_stride, float scale);

  // y[t, c] += sum_r h[t, r] b[r, c] for c in [c_begin, c_end); strides in floats between rows.
  void (*expand)(const float* h, const float* b, float* y, int64_t num_tokens, int64_t rank_rows,
                 int64_t h_stride, int64_t stride, int64_t c_begin, int64_t c_end);

  // y[t, c] += sum_i scale_i (gain_i[c] y[t, c] + shift_i[c]) for c in [c_begin, c_end); all terms
  // take the y from before.
  void (*affine)(const AffineRef* refs, int64_t num_refs, float* y, int64_t num_tokens,
                 int64_t stride, int64_t c_begin, int64_t c_end);
};

// The tables that this processor runs, the best one first; decided once.
const Kernels* const* supported_kernels(int* count);

inline const Kernels& kernels() {
  int count;
  return *supported_kernels(&count)[0];
}

}  // namespace lorafleet
