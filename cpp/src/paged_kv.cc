// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/paged_kv.h"

#include <sys/mman.h>

#include <cmath>
#include <string>
#include <utility>

#include "lorafleet/error.h"
#include "lorafleet/parallel.h"

namespace lorafleet {
namespace {

// Query tokens that one task attends: small, since later tokens of a prompt see more keys.
constexpr int64_t kSpanTokens = 16;

int64_t StorageBytes(const KvShape& s) {
  return s.num_layers * s.num_blocks * s.num_kv_heads * 2 * kBlockSize * s.head_dim *
         static_cast<int64_t>(sizeof(float));
}

void Require(bool condition, const std::string& message) {
  if (!condition) throw Error(ErrorKind::kInvalidInput, message);
}

// x[0, D) rotated in pairs (i, i + D / 2), as transformers' rotate_half does.
void Rotate(const float* x, const float* cos_sin, int64_t head_dim, float* out, int64_t stride) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float c = cos_sin[i], s = cos_sin[half + i];
    out[i * stride] = x[i] * c - x[i + half] * s;
    out[(i + half) * stride] = x[i + half] * c + x[i] * s;
  }
}

}  // namespace

void PagedKvCache::Free::operator()(float* memory) const {
  // The size is kept in the page before the first element.
  auto* base = reinterpret_cast<char*>(memory) - 4096;
  munmap(base, *reinterpret_cast<size_t*>(base));
}

PagedKvCache::PagedKvCache(const KvShape& shape, std::vector<float> rope_inv_freq)
    : shape_(shape), inv_freq_(std::move(rope_inv_freq)) {
  Require(shape.num_layers > 0 && shape.num_blocks > 0 && shape.num_kv_heads > 0 &&
              shape.head_dim > 0 && shape.num_qo_heads > 0,
          "kv cache: every dimension must be positive");
  Require(shape.head_dim % 8 == 0, "kv cache: head_dim must be a multiple of 8");
  Require(shape.num_qo_heads % shape.num_kv_heads == 0,
          "kv cache: num_qo_heads must be a multiple of num_kv_heads");
  Require(static_cast<int64_t>(inv_freq_.size()) * 2 == shape.head_dim,
          "kv cache: rope_inv_freq must have head_dim / 2 entries");
  // Anonymous pages: zero, and only those in use take memory.
  const size_t bytes = 4096 + static_cast<size_t>(StorageBytes(shape));
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    throw Error(ErrorKind::kExhausted,
                "kv cache: cannot reserve " + std::to_string(bytes) + " bytes");
  }
  *static_cast<size_t*>(base) = bytes;
  storage_.reset(reinterpret_cast<float*>(static_cast<char*>(base) + 4096));
}

int64_t PagedKvCache::bytes() const { return StorageBytes(shape_); }

float* PagedKvCache::KeyBlock(int64_t layer, int64_t block, int64_t head) const {
  const int64_t tile = kBlockSize * shape_.head_dim;
  const int64_t index = (layer * shape_.num_blocks + block) * shape_.num_kv_heads + head;
  return storage_.get() + index * 2 * tile;
}

float* PagedKvCache::ValueBlock(int64_t layer, int64_t block, int64_t head) const {
  return KeyBlock(layer, block, head) + kBlockSize * shape_.head_dim;
}

void PagedKvCache::ExtendRotations(int64_t num_positions) {
  const int64_t half = shape_.head_dim / 2;
  int64_t known = static_cast<int64_t>(cos_sin_.size()) / shape_.head_dim;
  if (known >= num_positions) return;
  cos_sin_.resize(num_positions * shape_.head_dim);
  for (; known < num_positions; ++known) {
    float* row = cos_sin_.data() + known * shape_.head_dim;
    for (int64_t i = 0; i < half; ++i) {
      // The angle is rounded to float32 before the cosine, as transformers does.
      const float angle = static_cast<float>(known) * inv_freq_[i];
      row[i] = std::cos(angle);
      row[half + i] = std::sin(angle);
    }
  }
}

void PagedKvCache::BeginForward(const int32_t* query_starts, const int32_t* context_lens,
                                const int32_t* block_table, int64_t num_sequences,
                                int64_t table_width) {
  Require(num_sequences > 0 && query_starts[0] == 0, "kv cache: query_starts must begin with 0");
  int64_t num_positions = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t count = int64_t{query_starts[s + 1]} - query_starts[s];
    Require(count > 0, "kv cache: sequence " + std::to_string(s) + " has no query tokens");
    Require(context_lens[s] >= 0, "kv cache: context_lens must not be negative");
    const int64_t end = context_lens[s] + count;
    const int64_t blocks = (end + kBlockSize - 1) / kBlockSize;
    Require(blocks <= table_width, "kv cache: sequence " + std::to_string(s) + " needs " +
                                       std::to_string(blocks) + " blocks, its table has " +
                                       std::to_string(table_width));
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t id = block_table[s * table_width + b];
      Require(id >= 0 && id < shape_.num_blocks, "kv cache: block id " + std::to_string(id) +
                                                     " is outside [0, " +
                                                     std::to_string(shape_.num_blocks) + ")");
    }
    if (end > num_positions) num_positions = end;
  }

  ExtendRotations(num_positions);
  query_starts_.assign(query_starts, query_starts + num_sequences + 1);
  context_lens_.assign(context_lens, context_lens + num_sequences);
  block_table_.assign(block_table, block_table + num_sequences * table_width);
  table_width_ = table_width;
  positions_.clear();
  sequences_.clear();
  spans_.clear();
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t count = query_starts[s + 1] - query_starts[s];
    for (int64_t i = 0; i < count; ++i) {
      positions_.push_back(static_cast<int32_t>(context_lens[s] + i));
      sequences_.push_back(static_cast<int32_t>(s));
    }
    for (int64_t i = 0; i < count; i += kSpanTokens) {
      spans_.push_back({s, query_starts[s] + i, std::min(kSpanTokens, count - i)});
    }
  }
  rotated_.resize(positions_.size() * shape_.num_qo_heads * shape_.head_dim);
}

void PagedKvCache::Append(int64_t layer, const float* qkv, int64_t token_begin,
                          int64_t token_end) {
  const int64_t d = shape_.head_dim;
  const int64_t row = (shape_.num_qo_heads + 2 * shape_.num_kv_heads) * d;
  for (int64_t t = token_begin; t < token_end; ++t) {
    const int64_t position = positions_[t];
    const float* cos_sin = cos_sin_.data() + position * d;
    const float* q = qkv + t * row;
    const float* k = q + shape_.num_qo_heads * d;
    const float* v = k + shape_.num_kv_heads * d;
    for (int64_t h = 0; h < shape_.num_qo_heads; ++h) {
      Rotate(q + h * d, cos_sin, d, rotated_.data() + (t * shape_.num_qo_heads + h) * d, 1);
    }
    const int64_t block = block_table_[sequences_[t] * table_width_ + position / kBlockSize];
    const int64_t place = position % kBlockSize;
    for (int64_t h = 0; h < shape_.num_kv_heads; ++h) {
      Rotate(k + h * d, cos_sin, d, KeyBlock(layer, block, h) + place, kBlockSize);
      float* value = ValueBlock(layer, block, h) + place * d;
      for (int64_t i = 0; i < d; ++i) value[i] = v[h * d + i];
    }
  }
}

void PagedKvCache::Attention(int64_t layer, float scale, const float* qkv, float* out) {
  Require(layer >= 0 && layer < shape_.num_layers, "kv cache: no such layer");
  ParallelFor(num_tokens(), 16,
              [&](int64_t begin, int64_t end) { Append(layer, qkv, begin, end); });

  const int64_t d = shape_.head_dim;
  const int64_t group = shape_.num_qo_heads / shape_.num_kv_heads;
  const int64_t num_spans = static_cast<int64_t>(spans_.size());
  // Task i is (head, span) in an order that deals long and short spans to every thread.
  ParallelFor(num_spans * shape_.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scores;
    thread_local std::vector<const float*> keys, values;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / num_spans;
      const Span& span = spans_[i % num_spans];
      const int64_t position = positions_[span.first_token];
      const int64_t num_blocks = (position + span.num_tokens + kBlockSize - 1) / kBlockSize;
      scores.resize(group * num_blocks * kBlockSize);
      keys.resize(num_blocks);
      values.resize(num_blocks);
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t id = block_table_[span.sequence * table_width_ + b];
        keys[b] = KeyBlock(layer, id, head);
        values[b] = ValueBlock(layer, id, head);
      }
      const int64_t offset = (span.first_token * shape_.num_qo_heads + head * group) * d;
      kernels().attend({rotated_.data() + offset, shape_.num_qo_heads * d, out + offset,
                        shape_.num_qo_heads * d, span.num_tokens, position, group, d, keys.data(),
                        values.data(), scale, scores.data()});
    }
  });
}

}  // namespace lorafleet
