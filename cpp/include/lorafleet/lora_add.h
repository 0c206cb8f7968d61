// Adding the adapters of a batch to a linear layer's output.
//
// Callers (src/ffi/exports.cc) have checked every shape and index.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lorafleet {

// The adapters of a batch: segment s is token rows [segment_starts[s], segment_starts[s + 1]) and
// takes page references [page_starts[s], page_starts[s + 1]).
struct AdapterPlan {
  int64_t num_segments;
  const int32_t* segment_starts;
  const int32_t* page_starts;
  const int32_t* page_ids;
  const float* page_scales;

  int64_t first_token(int64_t s) const { return segment_starts[s]; }
  int64_t num_tokens(int64_t s) const { return segment_starts[s + 1] - segment_starts[s]; }
  int64_t first_ref(int64_t s) const { return page_starts[s]; }
  int64_t num_refs(int64_t s) const { return page_starts[s + 1] - page_starts[s]; }
};

// What `used` says of a page whose first two rows of B hold, for a part, a gain less one and a
// shift.
inline constexpr int32_t kAffinePage = -1;

// The rank pages of one site. Part q covers output columns [part_ends[q - 1], part_ends[q]).
struct SitePages {
  const float* a;       // (num_pages, Q, P, K)
  const float* b;       // (num_pages, P, N)
  const int32_t* used;  // (num_pages, Q): live rank rows of a page, 0..P, or kAffinePage
  const int64_t* part_ends;
  int64_t num_parts;     // Q
  int64_t page_rows;     // P
  int64_t in_features;   // K
  int64_t out_features;  // N
};

// y += sum over pages of scale * B (A x), in place, for the rows of segments that have pages.
// Affine pages (DoRA's magnitudes, biases) come first, whatever their place in the plan: each adds
// scale * (gain * y + shift) with the y of the base. Only rank rows in use are read; the full-width
// delta is never materialised. A row's result does not depend on the other rows, and rows without
// pages are not touched.
void LoraAdd(float* y, const float* x, const SitePages& site, const AdapterPlan& plan);

}  // namespace lorafleet
