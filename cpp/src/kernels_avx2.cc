// Compiled with -mavx2 -mfma; reached only on processors that have both.
// SPDX-License-Identifier: Apache-2.0
#define LORAFLEET_ISA avx2
#define LORAFLEET_ISA_NAME "avx2"
#include "simd/table.h"
