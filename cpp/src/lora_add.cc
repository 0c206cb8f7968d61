// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/lora_add.h"

#include <algorithm>
#include <vector>

#include "lorafleet/kernels.h"
#include "lorafleet/parallel.h"

namespace lorafleet {
namespace {

// Tokens that share one pass over a page: enough to pay for reading it, few enough that the work of
// a long segment spreads over threads and its rows of y stay in the second cache meanwhile.
constexpr int64_t kTokenRun = 32;

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

// scale * (A x): for each token of each segment, a row of (page reference, part, rank row).
class Hidden {
 public:
  // The calling thread's, reused from call to call.
  static Hidden& Local() {
    thread_local Hidden hidden;
    return hidden;
  }

  void Resize(const SitePages& site, const AdapterPlan& plan) {
    ref_width_ = site.num_parts * site.page_rows;
    starts_.assign(1, 0);
    for (int64_t s = 0; s < plan.num_segments; ++s) {
      starts_.push_back(starts_.back() + plan.num_tokens(s) * plan.num_refs(s) * ref_width_);
    }
    if (static_cast<int64_t>(values_.size()) < starts_.back()) values_.resize(starts_.back());
  }

  // Floats from one token of a segment to the next.
  int64_t stride(int64_t num_refs) const { return num_refs * ref_width_; }

  // Token `t` and reference `i` of segment `s`, counted from the segment's first.
  float* at(int64_t s, int64_t t, int64_t num_refs, int64_t i) {
    return values_.data() + starts_[s] + t * stride(num_refs) + i * ref_width_;
  }

 private:
  int64_t ref_width_ = 0;
  std::vector<int64_t> starts_;  // of each segment
  std::vector<float> values_;
};

void ListShrinks(const SitePages& site, const AdapterPlan& plan, Hidden* hidden,
                 std::vector<ShrinkItem>* items) {
  items->clear();
  for (int64_t s = 0; s < plan.num_segments; ++s) {
    const int64_t tokens = plan.num_tokens(s), refs = plan.num_refs(s);
    for (int64_t i = 0; i < refs; ++i) {
      const int64_t page = plan.page_ids[plan.first_ref(s) + i];
      const float scale = plan.page_scales[plan.first_ref(s) + i];
      for (int64_t q = 0; q < site.num_parts; ++q) {
        const int64_t slice = page * site.num_parts + q;
        if (site.used[slice] <= 0) continue;
        const float* a = site.a + slice * site.page_rows * site.in_features;
        for (int64_t t = 0; t < tokens; t += kTokenRun) {
          items->push_back({plan.first_token(s) + t, std::min(kTokenRun, tokens - t), a,
                            site.used[slice], scale, hidden->at(s, t, refs, i) + q * site.page_rows,
                            hidden->stride(refs)});
        }
      }
    }
  }
}

// Applies the affine pages of segment `s` to columns [begin, end) of part `q`, which lie in it.
void ApplyAffine(const SitePages& site, const AdapterPlan& plan, int64_t s, int64_t q, float* y,
                 int64_t begin, int64_t end) {
  thread_local std::vector<AffineRef> refs;
  refs.clear();
  for (int64_t i = plan.first_ref(s); i < plan.first_ref(s) + plan.num_refs(s); ++i) {
    const int64_t page = plan.page_ids[i];
    if (site.used[page * site.num_parts + q] != kAffinePage) continue;
    const float* b = site.b + page * site.page_rows * site.out_features;
    refs.push_back({b, b + site.out_features, plan.page_scales[i]});
  }
  if (refs.empty()) return;
  kernels().affine(refs.data(), static_cast<int64_t>(refs.size()),
                   y + plan.first_token(s) * site.out_features, plan.num_tokens(s),
                   site.out_features, begin, end);
}

// Adds all pages of segment `s` to columns [begin, end) of its rows, pages in the plan's order.
void ExpandSegment(const SitePages& site, const AdapterPlan& plan, int64_t s, Hidden* hidden,
                   float* y, int64_t begin, int64_t end) {
  const int64_t tokens = plan.num_tokens(s), refs = plan.num_refs(s);
  for (int64_t q = 0, part_begin = 0; q < site.num_parts; part_begin = site.part_ends[q++]) {
    const int64_t c_begin = std::max(begin, part_begin), c_end = std::min(end, site.part_ends[q]);
    if (c_begin < c_end) ApplyAffine(site, plan, s, q, y, c_begin, c_end);
  }
  for (int64_t t = 0; t < tokens; t += kTokenRun) {
    float* rows = y + (plan.first_token(s) + t) * site.out_features;
    for (int64_t i = 0; i < refs; ++i) {
      const int64_t page = plan.page_ids[plan.first_ref(s) + i];
      const float* b = site.b + page * site.page_rows * site.out_features;
      int64_t part_begin = 0;
      for (int64_t q = 0; q < site.num_parts; ++q) {
        const int64_t c_begin = std::max(begin, part_begin);
        const int64_t c_end = std::min(end, site.part_ends[q]);
        part_begin = site.part_ends[q];
        const int64_t used = site.used[page * site.num_parts + q];
        if (used <= 0 || c_begin >= c_end) continue;
        kernels().expand(hidden->at(s, t, refs, i) + q * site.page_rows, b, rows,
                         std::min(kTokenRun, tokens - t), used, hidden->stride(refs),
                         site.out_features, c_begin, c_end);
      }
    }
  }
}

}  // namespace

void LoraAdd(float* y, const float* x, const SitePages& site, const AdapterPlan& plan) {
  if (plan.page_starts[plan.num_segments] == 0) return;
  thread_local std::vector<ShrinkItem> items;
  Hidden* hidden = &Hidden::Local();  // workers share the caller's
  hidden->Resize(site, plan);
  ListShrinks(site, plan, hidden, &items);

  const ShrinkItem* work = items.data();
  ParallelFor(static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const ShrinkItem& item = work[i];
      kernels().shrink(x + item.token * site.in_features, item.a, item.h, item.num_tokens,
                       site.in_features, item.rank_rows, item.h_stride, item.scale);
    }
  });
  // Each range of columns is one thread's for all tokens: no two write the same element.
  ParallelFor(site.out_features, 16, [&](int64_t begin, int64_t end) {
    for (int64_t s = 0; s < plan.num_segments; ++s) {
      ExpandSegment(site, plan, s, hidden, y, begin, end);
    }
  });
}

}  // namespace lorafleet
