// The paged KV cache and the attention over it.
//
// Keys and values live in blocks of kBlockSize tokens. Who owns which block is decided elsewhere
// (the engine's block table); this class stores, rotates and attends.
//
// Protocol of a step, from one thread: BeginForward once, then Attention once a layer.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lorafleet/kernels.h"
#include "lorafleet/status.h"

namespace lorafleet {

struct KvShape {
  int64_t num_layers;
  int64_t num_blocks;
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
};

class PagedKvCache {
 public:
  // `rope_inv_freq` has head_dim / 2 entries, head_dim is a multiple of 8. Memory is reserved here
  // and touched on first use. kInvalidInput when the shape does not fit, kExhausted when there is
  // no room.
  static Expected<std::unique_ptr<PagedKvCache>> Create(const KvShape& shape,
                                                        std::vector<float> rope_inv_freq);

  // Sets the step's sequences: S + 1 query_starts into the token rows, the number of tokens cached
  // before the step, and for each sequence a row of block ids, `table_width` long. Checks all of
  // them; kInvalidInput, changing nothing, if they do not fit. Blocks before the last may be shared
  // by sequences with equal beginnings; the caller sees to it that none is that a step writes.
  Status BeginForward(const int32_t* query_starts, const int32_t* context_lens,
                      const int32_t* block_table, int64_t num_sequences, int64_t table_width);

  // Rotates q and k, appends k and v to the pages and attends causally.
  // qkv is (T, (Hq + 2 Hkv) D), out is (T, Hq D), T as given to BeginForward.
  Status Attention(int64_t layer, float scale, const float* qkv, float* out);

  const KvShape& shape() const { return shape_; }
  int64_t num_tokens() const { return static_cast<int64_t>(positions_.size()); }
  int64_t bytes() const;

 private:
  PagedKvCache(const KvShape& shape, std::vector<float> rope_inv_freq)
      : shape_(shape), inv_freq_(std::move(rope_inv_freq)) {}

  // A run of query tokens of one sequence that one task attends, for every KV head.
  struct Span {
    int64_t sequence;
    int64_t first_token;
    int64_t num_tokens;
  };

  Status CheckSequences(const int32_t* query_starts, const int32_t* context_lens,
                        const int32_t* block_table, int64_t num_sequences,
                        int64_t table_width) const;
  void ExtendRotations(int64_t num_positions);
  void Append(int64_t layer, const float* qkv, int64_t token_begin, int64_t token_end);
  void AttendSpanOf(const Span& span, int64_t layer, int64_t head, float scale, float* out) const;
  float* KeyBlock(int64_t layer, int64_t block, int64_t head) const;
  float* ValueBlock(int64_t layer, int64_t block, int64_t head) const;

  KvShape shape_;
  std::vector<float> inv_freq_;
  std::vector<float> cos_sin_;  // per position: head_dim / 2 cosines, then as many sines
  // Blocks of every layer: for each (layer, block, head), keys (D, 16) and values (16, D).
  struct Unmap {
    size_t bytes;
    void operator()(float* memory) const;
  };
  std::unique_ptr<float, Unmap> storage_{nullptr, Unmap{0}};

  // The step.
  std::vector<int32_t> positions_;  // of each token
  std::vector<int32_t> sequences_;  // of each token
  std::vector<int32_t> query_starts_;
  std::vector<int32_t> context_lens_;
  std::vector<int32_t> block_table_;
  int64_t table_width_ = 0;
  std::vector<Span> spans_;
  std::vector<float> rotated_;  // (T, Hq, D): queries after rotation
};

}  // namespace lorafleet
