// The kernels of one instruction set as a table; included once by its translation unit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lorafleet/kernels.h"
#include "simd/attend.h"
#include "simd/dot.h"
#include "simd/rows.h"

namespace lorafleet {
namespace LORAFLEET_ISA {

extern const Kernels kTable;
const Kernels kTable = {
    LORAFLEET_ISA_NAME, Linear, RmsNorm, SiluMul, Attend, Shrink, Expand, Affine,
};

}  // namespace LORAFLEET_ISA
}  // namespace lorafleet
