// SPDX-License-Identifier: MIT
#pragma once

// Sums across the lanes of as many registers as a register has lanes, all at once: half the shuffles of one sum after the
// other.
//
// Every sum is formed by the same tree, halves first: (x0 + x8) + (x4 + x12) + …, so that a sum does not depend on the register
// it came from. (xsimd's haddp promises no such thing and differs between places on AVX-512.)

#include "batch.hpp"

// See batch.hpp.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace simd {

/// Where `sum_lanes` wants the register whose sum shall be in lane `lane`: the order that costs no final permutation.
template <class T>
constexpr int sum_place(int lane) noexcept {
#if defined(__AVX512F__)
  constexpr int single[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15}, twice[8] = {0, 1, 4, 5, 2, 3, 6, 7};
  return sizeof(T) == 4 ? single[lane] : twice[lane];
#elif defined(__SSE2__)
  // Within four floats the middle two change places; 128-bit halves, and doubles, keep theirs.
  return sizeof(T) == 4 && (lane % 4 == 1 || lane % 4 == 2) ? lane ^ 3 : lane;
#else
  return lane;
#endif
}

#if defined(__AVX512F__)
DIFFATTN_INLINE vec<float> sum_lanes(const vec<float> (&x)[16]) noexcept {
  __m512 a[8];
  DIFFATTN_UNROLL
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xEE));
  DIFFATTN_UNROLL
  for (int i = 0; i < 4; ++i)
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD));
  DIFFATTN_UNROLL
  for (int i = 0; i < 2; ++i)
    a[i] = _mm512_add_ps(_mm512_shuffle_ps(a[i], a[i + 2], 0x44), _mm512_shuffle_ps(a[i], a[i + 2], 0xEE));
  return _mm512_add_ps(_mm512_shuffle_ps(a[0], a[1], 0x88), _mm512_shuffle_ps(a[0], a[1], 0xDD));
}
DIFFATTN_INLINE vec<double> sum_lanes(const vec<double> (&x)[8]) noexcept {
  __m512d a[4];
  DIFFATTN_UNROLL
  for (int i = 0; i < 4; ++i)
    a[i] = _mm512_add_pd(_mm512_shuffle_f64x2(x[i], x[i + 4], 0x44), _mm512_shuffle_f64x2(x[i], x[i + 4], 0xEE));
  DIFFATTN_UNROLL
  for (int i = 0; i < 2; ++i)
    a[i] = _mm512_add_pd(_mm512_shuffle_f64x2(a[i], a[i + 2], 0x88), _mm512_shuffle_f64x2(a[i], a[i + 2], 0xDD));
  return _mm512_add_pd(_mm512_unpacklo_pd(a[0], a[1]), _mm512_unpackhi_pd(a[0], a[1]));
}
#elif defined(__AVX__)
DIFFATTN_INLINE vec<float> sum_lanes(const vec<float> (&x)[8]) noexcept {
  __m256 a[4];
  DIFFATTN_UNROLL
  for (int i = 0; i < 4; ++i)
    a[i] = _mm256_add_ps(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  DIFFATTN_UNROLL
  for (int i = 0; i < 2; ++i)
    a[i] = _mm256_add_ps(_mm256_shuffle_ps(a[i], a[i + 2], 0x44), _mm256_shuffle_ps(a[i], a[i + 2], 0xEE));
  return _mm256_add_ps(_mm256_shuffle_ps(a[0], a[1], 0x88), _mm256_shuffle_ps(a[0], a[1], 0xDD));
}
DIFFATTN_INLINE vec<double> sum_lanes(const vec<double> (&x)[4]) noexcept {
  __m256d a[2];
  DIFFATTN_UNROLL
  for (int i = 0; i < 2; ++i)
    a[i] = _mm256_add_pd(_mm256_permute2f128_pd(x[i], x[i + 2], 0x20), _mm256_permute2f128_pd(x[i], x[i + 2], 0x31));
  return _mm256_add_pd(_mm256_unpacklo_pd(a[0], a[1]), _mm256_unpackhi_pd(a[0], a[1]));
}
#elif defined(__SSE2__)
DIFFATTN_INLINE vec<float> sum_lanes(const vec<float> (&x)[4]) noexcept {
  __m128 a[2];
  DIFFATTN_UNROLL
  for (int i = 0; i < 2; ++i) a[i] = _mm_add_ps(_mm_shuffle_ps(x[i], x[i + 2], 0x44), _mm_shuffle_ps(x[i], x[i + 2], 0xEE));
  return _mm_add_ps(_mm_shuffle_ps(a[0], a[1], 0x88), _mm_shuffle_ps(a[0], a[1], 0xDD));
}
DIFFATTN_INLINE vec<double> sum_lanes(const vec<double> (&x)[2]) noexcept {
  return _mm_add_pd(_mm_unpacklo_pd(x[0], x[1]), _mm_unpackhi_pd(x[0], x[1]));
}
#else
template <class T>
DIFFATTN_INLINE vec<T> sum_lanes(const vec<T> (&x)[lanes<T>]) noexcept {
  T sums[lanes<T>], part[lanes<T>];
  for (int i = 0; i < lanes<T>; ++i) {
    store(part, x[i]);
    for (int half = lanes<T> / 2; half > 0; half /= 2)
      for (int j = 0; j < half; ++j) part[j] += part[j + half];
    sums[i] = part[0];
  }
  return load(sums);
}
#endif

}  // namespace simd
DIFFATTN_ISA_NAMESPACE_END

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
