// SPDX-License-Identifier: MIT
#pragma once

// Scaled transposition: between rows as users store them and the lane order of the kernels.

#include "../tensor.hpp"
#include "batch.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace simd {

#if defined(__AVX__)
/// 8 × 8 floats: pairs of rows four apart meet in one register, so that two rounds of in-lane shuffles finish the job.
DIFFATTN_INLINE void transpose_block(const float* src, index_t src_stride, float* dst, index_t dst_stride,
                                     float scale) noexcept {
  const __m256 s = _mm256_set1_ps(scale);
  __m256 r[8], t[8];
  DIFFATTN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float* const top = src + i * src_stride;
    const float* const bottom = src + (i + 4) * src_stride;
    r[i] = _mm256_mul_ps(s, _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(top)), _mm_loadu_ps(bottom), 1));
    r[i + 4] =
        _mm256_mul_ps(s, _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(top + 4)), _mm_loadu_ps(bottom + 4), 1));
  }
  DIFFATTN_UNROLL
  for (int i = 0; i < 8; i += 4) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    t[i + 2] = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
    t[i + 3] = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
  }
  DIFFATTN_UNROLL
  for (int i = 0; i < 8; i += 4) {
    _mm256_storeu_ps(dst + i * dst_stride, _mm256_shuffle_ps(t[i], t[i + 2], 0x44));
    _mm256_storeu_ps(dst + (i + 1) * dst_stride, _mm256_shuffle_ps(t[i], t[i + 2], 0xEE));
    _mm256_storeu_ps(dst + (i + 2) * dst_stride, _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44));
    _mm256_storeu_ps(dst + (i + 3) * dst_stride, _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE));
  }
}

/// 4 × 4 doubles, the same way.
DIFFATTN_INLINE void transpose_block(const double* src, index_t src_stride, double* dst, index_t dst_stride,
                                     double scale) noexcept {
  const __m256d s = _mm256_set1_pd(scale);
  __m256d r[4];
  DIFFATTN_UNROLL
  for (int i = 0; i < 2; ++i) {
    const double* const top = src + i * src_stride;
    const double* const bottom = src + (i + 2) * src_stride;
    r[i] = _mm256_mul_pd(s, _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(top)), _mm_loadu_pd(bottom), 1));
    r[i + 2] =
        _mm256_mul_pd(s, _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(top + 2)), _mm_loadu_pd(bottom + 2), 1));
  }
  DIFFATTN_UNROLL
  for (int i = 0; i < 4; i += 2) {
    _mm256_storeu_pd(dst + i * dst_stride, _mm256_unpacklo_pd(r[i], r[i + 1]));
    _mm256_storeu_pd(dst + (i + 1) * dst_stride, _mm256_unpackhi_pd(r[i], r[i + 1]));
  }
}
template <class T>
inline constexpr index_t transpose_size = 32 / sizeof(T);
#else
template <class T>
DIFFATTN_INLINE void transpose_block(const T* src, index_t, T* dst, index_t, T scale) noexcept {
  *dst = *src * scale;
}
template <class T>
inline constexpr index_t transpose_size = 1;
#endif

/// dst[c * dst_stride + r] = scale * src[r * src_stride + c] for r < rows, c < columns; touches nothing else.
///
/// Token rows of a tensor are often a multiple of 4 KiB apart and then share one cache set of 8 lines. So the outer loop must
/// walk the side with the long rows, few rows at a time: `gather` for a tensor as source, `scatter` as destination.
enum class transpose_order { gather, scatter };

template <transpose_order Order, class T>
DIFFATTN_NOINLINE void transpose(const T* src, index_t src_stride, index_t rows, index_t columns, T* dst, index_t dst_stride,
                                 T scale) noexcept {
  constexpr index_t n = transpose_size<T>;
  constexpr bool rows_outer = Order == transpose_order::gather;
  const index_t full_rows = rows / n * n, full_columns = columns / n * n;
  for (index_t i = 0; i < (rows_outer ? full_rows : full_columns); i += n)
    for (index_t j = 0; j < (rows_outer ? full_columns : full_rows); j += n) {
      const index_t r = rows_outer ? i : j, c = rows_outer ? j : i;
      transpose_block(src + r * src_stride + c, src_stride, dst + c * dst_stride + r, dst_stride, scale);
    }
  for (index_t r = 0; r < rows; ++r)
    for (index_t c = r < full_rows ? full_columns : 0; c < columns; ++c)
      dst[c * dst_stride + r] = scale * src[r * src_stride + c];
}

}  // namespace simd
DIFFATTN_ISA_NAMESPACE_END
