// The operators that compiled models call, over raw arrays: kernels plus the splitting of work.
//
// Callers (src/ffi/exports.cc) have checked every shape and index. Results of a token row do not
// depend on other rows nor on the number of threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lorafleet {

// y[T, N] = x[T, K] w[N, K]^T.
void Linear(const float* x, const float* w, float* y, int64_t num_tokens, int64_t in_features,
            int64_t out_features);

// y[T, K] = x / rms(x) * w.
void RmsNorm(const float* x, const float* w, float* y, int64_t num_tokens, int64_t features,
             float eps);

// y[T, F] = silu(gate_up[:, :F]) * gate_up[:, F:].
void SiluMul(const float* gate_up, float* y, int64_t num_tokens, int64_t features);

}  // namespace lorafleet
