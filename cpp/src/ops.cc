// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/ops.h"

#include "lorafleet/kernels.h"
#include "lorafleet/parallel.h"

namespace lorafleet {

void Linear(const float* x, const float* w, float* y, int64_t num_tokens, int64_t in_features,
            int64_t out_features) {
  // Outputs of a range: with many tokens, whole panels of the kernel.
  const int64_t grain = num_tokens < kPanelTokens ? 12 : kPanelRows;
  ParallelFor(out_features, grain, [&](int64_t begin, int64_t end) {
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

}  // namespace lorafleet
