// SPDX-License-Identifier: MIT
#pragma once

// tanh, for soft caps: accurate to a few ulp over the whole range, near 0 too, where tanh(x) = x and a cap must change nothing.
//
// With y = 2|x| and t = e^y - 1, tanh|x| = t / (t + 2). Below y = 0.7 (about ln 2, where e^y - 1 begins to lose a bit) t is its
// Taylor series, y (1 + y/2 (1 + y/3 (…))); above, e^y is a power of two and 1 - 2 / (e^y + 1) loses nothing.

#include "exp2.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace simd {

template <class T>
DIFFATTN_INLINE vec<T> tanh(vec<T> x) noexcept {
  // The first term left out is 0.7^terms / (terms + 1)! of t: 1.1e-8 in float, 9e-18 in double.
  constexpr int terms = sizeof(T) == 4 ? 9 : 16;
  constexpr double two_log2_e = 2 * 1.44269504088896340736;
  const vec<T> one = broadcast(T(1)), two = broadcast(T(2)), a = abs<T>(x), y = a * two;
  vec<T> p = one;
  DIFFATTN_UNROLL
  for (int i = terms; i >= 2; --i) p = fma<T>(p * y, broadcast(static_cast<T>(1.0 / i)), one);
  const vec<T> t = y * p, near = t / (t + two);
  // From |x| = 22 on the result is 1 in double as well; e^44 is far from overflow. NaN fails the comparison and stays.
  const vec<T> capped = select<T>(a > broadcast(T(22)), broadcast(T(22)), a);
  const vec<T> far = one - two / (exp2<T>(capped * broadcast(static_cast<T>(two_log2_e))) + one);
  const vec<T> result = select<T>(y < broadcast(T(0.7)), near, far);
  return select<T>(x < broadcast(T(0)), broadcast(T(0)) - result, result);
}

}  // namespace simd
DIFFATTN_ISA_NAMESPACE_END
