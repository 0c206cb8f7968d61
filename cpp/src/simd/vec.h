// Eight floats at once, in GCC/Clang vector types; the only place that names an instruction set.
//
// Included by one translation unit per instruction set, which defines LORAFLEET_ISA. Nothing here
// or in the headers beside it uses standard templates, so that no code compiled for a newer
// processor can be shared with the rest of the library by the linker. Compiled without contraction:
// where a multiplication and an addition become one operation is written down, by MulAdd, and hence
// the same in every tile shape. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LORAFLEET_UNROLL _Pragma("GCC unroll 16")

namespace lorafleet {
namespace LORAFLEET_ISA {
namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(32)));
constexpr int64_t kLanes = 8;

inline Vec Load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// The first `count` < kLanes floats, zeros after them; reads nothing else.
inline Vec LoadPart(const float* p, int64_t count) {
  float padded[kLanes] = {};
  memcpy(padded, p, count * sizeof(float));
  return Load(padded);
}

inline void Store(float* p, Vec v) {
  memcpy(p, &v, sizeof(v));
}

inline Vec Splat(float s) {
  return Vec{s, s, s, s, s, s, s, s};
}

// a * b + c, rounded once where the processor can.
inline Vec MulAdd(Vec a, Vec b, Vec c) {
#ifdef __FMA__
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline float MulAdd(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// {a0+a1, a2+a3, b0+b1, b2+b3, a4+a5, a6+a7, b4+b5, b6+b7}.
inline Vec PairSums(Vec a, Vec b) {
#ifdef __AVX2__
  return (Vec)_mm256_hadd_ps((__m256)a, (__m256)b);
#else
  return Vec{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3],
             a[4] + a[5], a[6] + a[7], b[4] + b[5], b[6] + b[7]};
#endif
}

// The lane sums of four vectors. Every dot product of the library ends here, so each adds its lanes
// in this one order: ((0+1)+(2+3)) + ((4+5)+(6+7)).
inline Vec4 Sum4(Vec a, Vec b, Vec c, Vec d) {
  const Vec s = PairSums(PairSums(a, b), PairSums(c, d));
#ifdef __AVX2__
  return (Vec4)_mm_add_ps(_mm256_castps256_ps128((__m256)s), _mm256_extractf128_ps((__m256)s, 1));
#else
  return Vec4{s[0] + s[4], s[1] + s[5], s[2] + s[6], s[3] + s[7]};
#endif
}

inline float Sum(Vec v) {
  return Sum4(v, Vec{}, Vec{}, Vec{})[0];
}

inline float Max(Vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

inline Vec Select(IntVec mask, Vec yes, Vec no) {
  return (Vec)((mask & (IntVec)yes) | (~mask & (IntVec)no));
}

// e^x with a relative error below 2e-7: 2^n times a degree-6 polynomial on [-ln2/2, ln2/2]
// (coefficients of the Cephes library's expf). Below -87 it is 0, above 88.3 it is infinite.
inline Vec Exp(Vec x) {
  const Vec low = Splat(-87.0f), high = Splat(88.3f);
  const IntVec underflow = x<low, overflow = x> high;
  x = Select(underflow, low, x);
  x = Select(overflow, high, x);
  const Vec magic = Splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = MulAdd(x, Splat(1.44269504088896341f), magic) - magic;
  Vec r = MulAdd(n, Splat(-0.693359375f), x);
  r = MulAdd(n, Splat(2.12194440e-4f), r);
  Vec p = Splat(1.9875691500e-4f);
  p = MulAdd(p, r, Splat(1.3981999507e-3f));
  p = MulAdd(p, r, Splat(8.3334519073e-3f));
  p = MulAdd(p, r, Splat(4.1665795894e-2f));
  p = MulAdd(p, r, Splat(1.6666665459e-1f));
  p = MulAdd(p, r, Splat(5.0000001201e-1f));
  p = MulAdd(p, r * r, r + Splat(1.0f));
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  const Vec finite = Select(underflow, Splat(0.0f), p * (Vec)exponent);
  return Select(overflow, Splat(INFINITY), finite);
}

}  // namespace
}  // namespace LORAFLEET_ISA
}  // namespace lorafleet
