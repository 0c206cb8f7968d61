// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/paged_kv.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "lorafleet/parallel.h"

namespace lorafleet {
namespace {

// Query tokens that one task attends, and that one task appends.
constexpr int64_t kSpanTokens = 16;

int64_t StorageBytes(const KvShape& s) {
  return s.num_layers * s.num_blocks * s.num_kv_heads * 2 * kBlockSize * s.head_dim *
         static_cast<int64_t>(sizeof(float));
}

Error Invalid(const std::string& message) {
  return Error(ErrorKind::kInvalidInput, "kv cache: " + message);
}

Status CheckShape(const KvShape& s, size_t num_frequencies) {
  for (const int64_t dim :
       {s.num_layers, s.num_blocks, s.num_qo_heads, s.num_kv_heads, s.head_dim}) {
    if (dim < 1 || dim > INT32_MAX) return Invalid("every dimension must be in [1, 2^31)");
  }
  if (s.head_dim % 8 != 0) return Invalid("head_dim must be a multiple of 8");
  if (s.num_qo_heads % s.num_kv_heads != 0) {
    return Invalid("num_qo_heads must be a multiple of num_kv_heads");
  }
  if (static_cast<int64_t>(num_frequencies) * 2 != s.head_dim) {
    return Invalid("rope_inv_freq must have head_dim / 2 entries");
  }
  int64_t bytes = 2 * kBlockSize * sizeof(float);
  for (const int64_t dim : {s.num_layers, s.num_blocks, s.num_kv_heads, s.head_dim}) {
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return Invalid("too many elements");
  }
  return Status();
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

void PagedKvCache::Unmap::operator()(float* memory) const {
  munmap(memory, bytes);
}

Expected<std::unique_ptr<PagedKvCache>> PagedKvCache::Create(const KvShape& shape,
                                                             std::vector<float> rope_inv_freq) {
  const Status fits = CheckShape(shape, rope_inv_freq.size());
  if (!fits.ok()) return fits.error();
  std::unique_ptr<PagedKvCache> cache(new PagedKvCache(shape, std::move(rope_inv_freq)));
  // Anonymous pages: zero, and only those in use take memory.
  const size_t bytes = static_cast<size_t>(StorageBytes(shape));
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return Error(ErrorKind::kExhausted,
                 "kv cache: cannot reserve " + std::to_string(bytes) + " bytes");
  }
  cache->storage_ = {static_cast<float*>(memory), Unmap{bytes}};
  return cache;
}

int64_t PagedKvCache::bytes() const {
  return StorageBytes(shape_);
}

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

Status PagedKvCache::CheckSequences(const int32_t* query_starts, const int32_t* context_lens,
                                    const int32_t* block_table, int64_t num_sequences,
                                    int64_t table_width) const {
  if (num_sequences < 1) return Invalid("expected at least one sequence");
  if (query_starts[0] != 0) return Invalid("query_starts must begin with 0");
  for (int64_t s = 0; s < num_sequences; ++s) {
    const std::string name = "sequence " + std::to_string(s);
    const int64_t count = int64_t{query_starts[s + 1]} - query_starts[s];
    if (count < 1) return Invalid(name + " has no query tokens");
    if (context_lens[s] < 0) return Invalid(name + " has a negative context length");
    const int64_t blocks = (context_lens[s] + count + kBlockSize - 1) / kBlockSize;
    if (blocks > table_width) {
      return Invalid(name + " needs " + std::to_string(blocks) + " blocks, its table has " +
                     std::to_string(table_width));
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t id = block_table[s * table_width + b];
      if (id < 0 || id >= shape_.num_blocks) {
        return Invalid(name + ": block id " + std::to_string(id) + " is outside [0, " +
                       std::to_string(shape_.num_blocks) + ")");
      }
    }
  }
  return Status();
}

Status PagedKvCache::BeginForward(const int32_t* query_starts, const int32_t* context_lens,
                                  const int32_t* block_table, int64_t num_sequences,
                                  int64_t table_width) {
  const Status fits =
      CheckSequences(query_starts, context_lens, block_table, num_sequences, table_width);
  if (!fits.ok()) return fits;
  query_starts_.assign(query_starts, query_starts + num_sequences + 1);
  context_lens_.assign(context_lens, context_lens + num_sequences);
  block_table_.assign(block_table, block_table + num_sequences * table_width);
  table_width_ = table_width;
  positions_.clear();
  sequences_.clear();
  spans_.clear();
  int64_t num_positions = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t count = query_starts[s + 1] - query_starts[s];
    num_positions = std::max(num_positions, context_lens[s] + count);
    for (int64_t i = 0; i < count; ++i) {
      positions_.push_back(static_cast<int32_t>(context_lens[s] + i));
      sequences_.push_back(static_cast<int32_t>(s));
    }
    for (int64_t i = 0; i < count; i += kSpanTokens) {
      spans_.push_back({s, query_starts[s] + i, std::min(kSpanTokens, count - i)});
    }
  }
  ExtendRotations(num_positions);
  rotated_.resize(positions_.size() * shape_.num_qo_heads * shape_.head_dim);
  return Status();
}

void PagedKvCache::Append(int64_t layer, const float* qkv, int64_t token_begin, int64_t token_end) {
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

void PagedKvCache::AttendSpanOf(const Span& span, int64_t layer, int64_t head, float scale,
                                float* out) const {
  thread_local std::vector<float> scores;
  thread_local std::vector<const float*> keys, values;
  const int64_t d = shape_.head_dim;
  const int64_t group = shape_.num_qo_heads / shape_.num_kv_heads;
  const int64_t position = positions_[span.first_token];
  const int64_t num_blocks = (position + span.num_tokens + kBlockSize - 1) / kBlockSize;
  scores.resize(kScoreRows * num_blocks * kBlockSize);
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

Status PagedKvCache::Attention(int64_t layer, float scale, const float* qkv, float* out) {
  if (layer < 0 || layer >= shape_.num_layers) {
    return Invalid("layer " + std::to_string(layer) + " is outside [0, " +
                   std::to_string(shape_.num_layers) + ")");
  }
  ParallelFor(num_tokens(), kSpanTokens,
              [&](int64_t begin, int64_t end) { Append(layer, qkv, begin, end); });
  // Late spans see the most keys: they are dealt first, so that none is left over at the end.
  const int64_t num_tasks = static_cast<int64_t>(spans_.size()) * shape_.num_kv_heads;
  ParallelFor(num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t task = num_tasks - 1 - i;
      AttendSpanOf(spans_[task / shape_.num_kv_heads], layer, task % shape_.num_kv_heads, scale,
                   out);
    }
  });
  return Status();
}

}  // namespace lorafleet
