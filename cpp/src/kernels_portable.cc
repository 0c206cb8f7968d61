// SPDX-License-Identifier: Apache-2.0
#define LORAFLEET_ISA portable
#define LORAFLEET_ISA_NAME "portable"
#include "simd/table.h"
