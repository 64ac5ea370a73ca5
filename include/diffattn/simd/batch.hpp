// SPDX-License-Identifier: MIT
#pragma once

// The vector vocabulary of the kernels: a thin layer over xsimd. This file alone hides the differences between xsimd 8 and
// today's, and it holds the few intrinsics that xsimd 8 lacks. Everything else in the library is written in these words.

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <xsimd/xsimd.hpp>

#include "../config.hpp"

// GCC 12's own AVX-512 header passes deliberately uninitialised registers (its bug 105593) and warns in whoever inlines it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace simd {

using arch = xsimd::default_arch;
template <class T>
using vec = xsimd::batch<T, arch>;
template <class T>
using mask = xsimd::batch_bool<T, arch>;

/// Elements of one vector register.
template <class T>
inline constexpr int lanes = static_cast<int>(vec<T>::size);

template <class T>
DIFFATTN_INLINE vec<T> load(const T* p) noexcept {
  return vec<T>::load_unaligned(p);
}
template <class T>
DIFFATTN_INLINE void store(T* p, vec<T> v) noexcept {
  v.store_unaligned(p);
}
template <class T>
DIFFATTN_INLINE vec<T> broadcast(T x) noexcept {
  return vec<T>(x);
}

/// a * b + c, one rounding where the target has fused multiply-add. xsimd 8 has no AVX-512 form.
template <class T>
DIFFATTN_INLINE vec<T> fma(vec<T> a, vec<T> b, vec<T> c) noexcept {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return _mm512_fmadd_ps(a, b, c);
  else
    return _mm512_fmadd_pd(a, b, c);
#else
  return xsimd::fma(a, b, c);
#endif
}

/// c - a * b, rounded as `fma`.
template <class T>
DIFFATTN_INLINE vec<T> fnma(vec<T> a, vec<T> b, vec<T> c) noexcept {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return _mm512_fnmadd_ps(a, b, c);
  else
    return _mm512_fnmadd_pd(a, b, c);
#else
  return xsimd::fnma(a, b, c);
#endif
}

/// The larger of `bound` and x; x where x is NaN. x86 gives the second operand if either is NaN; xsimd 8 and 14 pass the
/// operands in opposite orders, so the order is fixed here.
template <class T>
DIFFATTN_INLINE vec<T> at_least(vec<T> bound, vec<T> x) noexcept {
  constexpr bool single = sizeof(T) == 4;
#if defined(__AVX512F__)
  if constexpr (single)
    return _mm512_max_ps(bound, x);
  else
    return _mm512_max_pd(bound, x);
#elif defined(__AVX__)
  if constexpr (single)
    return _mm256_max_ps(bound, x);
  else
    return _mm256_max_pd(bound, x);
#elif defined(__SSE2__)
  if constexpr (single)
    return _mm_max_ps(bound, x);
  else
    return _mm_max_pd(bound, x);
#else
  static_cast<void>(single);
  return xsimd::select(x < bound, bound, x);
#endif
}

template <class T>
DIFFATTN_INLINE vec<T> abs(vec<T> x) noexcept {
  return xsimd::abs(x);
}
template <class T>
DIFFATTN_INLINE vec<T> sqrt(vec<T> x) noexcept {
  return xsimd::sqrt(x);
}
/// The nearest integer.
template <class T>
DIFFATTN_INLINE vec<T> nearest(vec<T> x) noexcept {
  return xsimd::nearbyint(x);
}

template <class T>
DIFFATTN_INLINE vec<T> select(mask<T> m, vec<T> if_true, vec<T> if_false) noexcept {
  return xsimd::select(m, if_true, if_false);
}
template <class T>
DIFFATTN_INLINE bool any(mask<T> m) noexcept {
  return xsimd::any(m);
}
template <class T>
DIFFATTN_INLINE bool all(mask<T> m) noexcept {
  return xsimd::all(m);
}

/// The bits of `x` moved `Bits` places up, as a floating vector again.
template <int Bits, class T>
DIFFATTN_INLINE vec<T> shift_bits_left(vec<T> x) noexcept {
  using int_t = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
#if XSIMD_VERSION_MAJOR < 9
  return xsimd::bitwise_cast<vec<T>>(xsimd::bitwise_cast<vec<int_t>>(x) << Bits);
#else
  return xsimd::bitwise_cast<T>(xsimd::bitwise_cast<int_t>(x) << Bits);
#endif
}

/// `load`, and the value stays in a register. GCC otherwise folds one load into each of the multiply-adds that use it, which
/// triples the loads of a register tile and halves its speed.
template <class T>
DIFFATTN_INLINE vec<T> load_pinned(const T* p) noexcept {
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
  auto bits = load(p).data;
  asm("" : "+v"(bits));
  return vec<T>(bits);
#else
  return load(p);
#endif
}

/// sum = x + offset and rest = x - (sum - offset), with these roundings. Clang defines no macro under -fassociative-math and
/// -funsafe-math-optimizations, so config.hpp cannot refuse them there; the pragma holds for the operators written here.
template <class T>
DIFFATTN_INLINE void split(vec<T> x, vec<T> offset, vec<T>& sum, vec<T>& rest) noexcept {
#if defined(__clang__)
#pragma clang fp reassociate(off)
  const auto bits = x.data + offset.data;
  rest = vec<T>(x.data - (bits - offset.data));
  sum = vec<T>(bits);
#else
  sum = x + offset;
  rest = x - (sum - offset);
#endif
}

DIFFATTN_INLINE void prefetch(const void* p) noexcept {
#if defined(__GNUC__)
  __builtin_prefetch(p);
#else
  (void)p;
#endif
}

DIFFATTN_INLINE void prefetch_to_l2(const void* p) noexcept {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 2);
#else
  (void)p;
#endif
}

}  // namespace simd
DIFFATTN_ISA_NAMESPACE_END

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
