// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/ops.h"

#include <algorithm>
#include <vector>

#include "lorafleet/kernels.h"
#include "lorafleet/parallel.h"

namespace lorafleet {

void Linear(const float* x, const float* w, float* y, int64_t num_tokens, int64_t in_features,
            int64_t out_features) {
  ParallelFor(out_features, 12, [&](int64_t begin, int64_t end) {
    kernels().linear(x, w, y, num_tokens, in_features, out_features, begin, end);
  });
}

void RmsNorm(const float* x, const float* w, float* y, int64_t num_tokens, int64_t features,
             float eps) {
  ParallelFor(num_tokens, 16, [&](int64_t begin, int64_t end) {
    kernels().rms_norm(x, w, y, features, eps, begin, end);
  });
}

void SiluMul(const float* gate_up, float* y, int64_t num_tokens, int64_t features) {
  ParallelFor(num_tokens, 4, [&](int64_t begin, int64_t end) {
    kernels().silu_mul(gate_up, y, features, begin, end);
  });
}

namespace {

// Work of the shrink: one page reference's rank rows of one part, for a run of tokens.
struct ShrinkItem {
  int64_t token;
  int64_t num_tokens;
  const float* a;
  int64_t rank_rows;
  float scale;
  float* h;
  int64_t h_stride;
};

// Tokens of one shrink item: enough to share the page's rows, few enough to spread over threads.
constexpr int64_t kShrinkTokens = 32;

}  // namespace

void LoraAdd(float* y, const float* x, const SitePages& site, const AdapterPlan& plan) {
  const int64_t num_refs = plan.page_starts[plan.num_segments];
  if (num_refs == 0) return;
  const int64_t ref_rows = site.num_parts * site.page_rows;

  // h holds, for each token of each segment, scale * (A x) for all its page references: rows of
  // (reference, part, rank row). Offsets of segments are running sums.
  thread_local std::vector<float> h;
  thread_local std::vector<int64_t> h_starts;
  thread_local std::vector<ShrinkItem> items;
  h_starts.assign(1, 0);
  for (int64_t s = 0; s < plan.num_segments; ++s) {
    const int64_t tokens = plan.segment_starts[s + 1] - plan.segment_starts[s];
    const int64_t refs = plan.page_starts[s + 1] - plan.page_starts[s];
    h_starts.push_back(h_starts.back() + tokens * refs * ref_rows);
  }
  if (static_cast<int64_t>(h.size()) < h_starts.back()) h.resize(h_starts.back());

  items.clear();
  for (int64_t s = 0; s < plan.num_segments; ++s) {
    const int64_t first = plan.segment_starts[s];
    const int64_t tokens = plan.segment_starts[s + 1] - first;
    const int64_t refs = plan.page_starts[s + 1] - plan.page_starts[s];
    for (int64_t i = 0; i < refs; ++i) {
      const int64_t page = plan.page_ids[plan.page_starts[s] + i];
      const float scale = plan.page_scales[plan.page_starts[s] + i];
      for (int64_t q = 0; q < site.num_parts; ++q) {
        const int64_t used = site.used[page * site.num_parts + q];
        if (used == 0) continue;
        const float* a = site.a + (page * ref_rows + q * site.page_rows) * site.in_features;
        for (int64_t t = 0; t < tokens; t += kShrinkTokens) {
          float* out = h.data() + h_starts[s] + t * refs * ref_rows + i * ref_rows +
                       q * site.page_rows;
          items.push_back({first + t, std::min(kShrinkTokens, tokens - t), a, used, scale, out,
                           refs * ref_rows});
        }
      }
    }
  }
  // The thread_local buffers belong to this thread: workers reach them through these pointers.
  const ShrinkItem* work = items.data();
  const float* hidden = h.data();
  const int64_t* hidden_starts = h_starts.data();

  ParallelFor(static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const ShrinkItem& item = work[i];
      kernels().shrink(x + item.token * site.in_features, item.a, item.h, item.num_tokens,
                       site.in_features, item.rank_rows, item.h_stride, item.scale);
    }
  });

  // Each thread owns a range of columns for all tokens: no two write the same element, and every
  // element takes its pages in the plan's order.
  ParallelFor(site.out_features, 16, [&](int64_t begin, int64_t end) {
    for (int64_t s = 0; s < plan.num_segments; ++s) {
      const int64_t first = plan.segment_starts[s];
      const int64_t tokens = plan.segment_starts[s + 1] - first;
      const int64_t refs = plan.page_starts[s + 1] - plan.page_starts[s];
      for (int64_t i = 0; i < refs; ++i) {
        const int64_t page = plan.page_ids[plan.page_starts[s] + i];
        int64_t part_begin = 0;
        for (int64_t q = 0; q < site.num_parts; ++q) {
          const int64_t part_end = site.part_ends[q];
          const int64_t c_begin = std::max(begin, part_begin);
          const int64_t c_end = std::min(end, part_end);
          part_begin = part_end;
          const int64_t used = site.used[page * site.num_parts + q];
          if (used == 0 || c_begin >= c_end) continue;
          kernels().expand(hidden + hidden_starts[s] + i * ref_rows + q * site.page_rows,
                           site.b + page * site.page_rows * site.out_features,
                           y + first * site.out_features, tokens, used, refs * ref_rows,
                           site.out_features, c_begin, c_end);
        }
      }
    }
  });
}

}  // namespace lorafleet
