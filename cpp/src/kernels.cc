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

const Kernels* const* supported_kernels(int* count) {
#ifdef LORAFLEET_HAVE_AVX2
  static const Kernels* const kBoth[] = {&avx2::kTable, &portable::kTable};
  static const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  *count = fast ? 2 : 1;
  return fast ? kBoth : kBoth + 1;
#else
  static const Kernels* const kOnly[] = {&portable::kTable};
  *count = 1;
  return kOnly;
#endif
}

}  // namespace lorafleet
