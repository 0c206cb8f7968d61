// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/kernels.h"

namespace lorafleet {
namespace portable {
extern const Kernels kTable;
}
#ifdef LORAFLEET_HAVE_AVX2
namespace avx2 {
extern const Kernels kTable;
}
#endif

const Kernels& kernels() {
#ifdef LORAFLEET_HAVE_AVX2
  static const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (fast) return avx2::kTable;
#endif
  return portable::kTable;
}

}  // namespace lorafleet
