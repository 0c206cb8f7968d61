// Splitting work over TVM's own thread pool, so that model and kernels share one set of threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

namespace lorafleet {

// Calls `body(context, begin, end)` on disjoint ranges that cover [0, count), in parallel; ranges
// begin at multiples of `grain`. A thread that is done takes the next range, so which thread gets
// what, and how long ranges are, may differ from call to call: `body` must not care. Runs in the
// calling thread when TVM's runtime is not in the process or the work is a single grain. `body`
// must not throw.
void ParallelRanges(int64_t count, int64_t grain,
                    void (*body)(void* context, int64_t begin, int64_t end), void* context);

// The same for a callable `void(int64_t begin, int64_t end)`.
template <typename Body>
void ParallelFor(int64_t count, int64_t grain, Body&& body) {
  using Callable = std::remove_reference_t<Body>;
  ParallelRanges(
      count, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<Callable*>(context))(begin, end);
      },
      &body);
}

}  // namespace lorafleet
