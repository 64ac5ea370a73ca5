// SPDX-License-Identifier: MIT
#pragma once

// Scaled transposition: between rows as users store them and the lane order of the kernels.

#include "../tensor.hpp"
#include "batch.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace simd {

// The block of a target: `block_rows` rows of `block_columns` numbers each become `block_columns` rows.
#if defined(__AVX__)
template <class T>
inline constexpr index_t block_rows = 32 / sizeof(T);
template <class T>
inline constexpr index_t block_columns = 16 / sizeof(T);

/// 8 × 4 floats: rows four apart meet in one register, so that shuffles within its halves finish the job.
DIFFATTN_INLINE void transpose_block(const float* src, index_t src_stride, float* dst, index_t dst_stride,
                                     float scale) noexcept {
  __m256 r[4], t[4];
  DIFFATTN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m128 top = _mm_loadu_ps(src + i * src_stride), bottom = _mm_loadu_ps(src + (i + 4) * src_stride);
    r[i] = _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_insertf128_ps(_mm256_castps128_ps256(top), bottom, 1));
  }
  DIFFATTN_UNROLL
  for (int i = 0; i < 4; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  DIFFATTN_UNROLL
  for (int i = 0; i < 2; ++i) {
    _mm256_storeu_ps(dst + 2 * i * dst_stride, _mm256_shuffle_ps(t[i], t[i + 2], 0x44));
    _mm256_storeu_ps(dst + (2 * i + 1) * dst_stride, _mm256_shuffle_ps(t[i], t[i + 2], 0xEE));
  }
}

/// 4 × 2 doubles, the same way.
DIFFATTN_INLINE void transpose_block(const double* src, index_t src_stride, double* dst, index_t dst_stride,
                                     double scale) noexcept {
  __m256d r[2];
  DIFFATTN_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m128d top = _mm_loadu_pd(src + i * src_stride), bottom = _mm_loadu_pd(src + (i + 2) * src_stride);
    r[i] = _mm256_mul_pd(_mm256_set1_pd(scale), _mm256_insertf128_pd(_mm256_castpd128_pd256(top), bottom, 1));
  }
  _mm256_storeu_pd(dst, _mm256_unpacklo_pd(r[0], r[1]));
  _mm256_storeu_pd(dst + dst_stride, _mm256_unpackhi_pd(r[0], r[1]));
}
#else
template <class T>
inline constexpr index_t block_rows = 1;
template <class T>
inline constexpr index_t block_columns = 1;

template <class T>
DIFFATTN_INLINE void transpose_block(const T* src, index_t, T* dst, index_t, T scale) noexcept {
  *dst = *src * scale;
}
#endif

/// dst[c * dst_stride + r] = scale * src[r * src_stride + c] for r < rows, c < columns; touches nothing else.
///
/// Token rows of a tensor are often a multiple of 4 KiB apart and then share one cache set of 8 lines. So the outer loop must
/// walk the side with the long rows, few rows at a time: `gather` for a tensor as source, `scatter` as destination.
enum class transpose_order { gather, scatter };

template <transpose_order Order, class T>
DIFFATTN_NOINLINE void transpose(const T* src, index_t src_stride, index_t rows, index_t columns, T* dst, index_t dst_stride,
                                 T scale) noexcept {
  const index_t full_rows = rows / block_rows<T> * block_rows<T>, full_columns = columns / block_columns<T> * block_columns<T>;
  const auto block = [=](index_t r, index_t c) {
    transpose_block(src + r * src_stride + c, src_stride, dst + c * dst_stride + r, dst_stride, scale);
  };
  if constexpr (Order == transpose_order::gather) {
    for (index_t r = 0; r < full_rows; r += block_rows<T>)
      for (index_t c = 0; c < full_columns; c += block_columns<T>) block(r, c);
  } else {
    for (index_t c = 0; c < full_columns; c += block_columns<T>)
      for (index_t r = 0; r < full_rows; r += block_rows<T>) block(r, c);
  }
  for (index_t r = 0; r < rows; ++r)
    for (index_t c = r < full_rows ? full_columns : 0; c < columns; ++c)
      dst[c * dst_stride + r] = scale * src[r * src_stride + c];
}

}  // namespace simd
DIFFATTN_ISA_NAMESPACE_END
