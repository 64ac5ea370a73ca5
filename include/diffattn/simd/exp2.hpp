// SPDX-License-Identifier: MIT
#pragma once

// 2^x, the only transcendental function of the kernels.
//
// x = n + f with n the nearest integer and f in [-1/2, 1/2]; 2^x = 2^n p(f). Adding 1.5 * 2^23 pushes the fraction out of a
// float, which rounds to n and leaves n in the low bits of the sum; with the exponent bias added to the constant those
// bits, moved into the exponent field, are the float 2^n itself. There is no Cody-Waite step, since f = x - n is exact in
// base 2, and no float-to-integer conversion. x is clamped from below at minus the bias, where that float is exactly 0: so
// -inf, the score of a masked key, has weight exactly 0 without a branch. NaN passes through (the clamp keeps it and
// the product with p does too).
//
// p is the minimax polynomial of relative error with p(0) = 1, computed by a Remez exchange in 200-bit arithmetic: degree 6
// errs by 1.5e-8 (a quarter of a float's half ulp), degree 11 by 2.2e-17. Measured with all roundings: below 1 ulp in float and
// 1.1 ulp in double on results down to the smallest normal number (tests/simd/exp2_test.cpp). Where the processor rounds up,
// down or to zero, n is a neighbour of x on one side, f reaches ±1, and p errs there by up to 128 ulp (float), 1.1e5 ulp
// (double).

#include "batch.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace simd {

template <class T>
struct exp2_constants;

template <>
struct exp2_constants<float> {
  static constexpr int mantissa_bits = 23;
  static constexpr float bias = 127.0f;
  static constexpr float round = 12582912.0f + 127.0f;  // 1.5 * 2^23 + bias
  static constexpr int degree = 6;
  static constexpr float c[degree + 1] = {1.0f,
                                          0.6931471856321005f,
                                          0.2402264401381191f,
                                          0.0555037121455596f,
                                          0.0096193426931470f,
                                          0.0013383379420821f,
                                          0.0001499161504410f};
};

template <>
struct exp2_constants<double> {
  static constexpr int mantissa_bits = 52;
  static constexpr double bias = 1023.0;
  static constexpr double round = 6755399441055744.0 + 1023.0;  // 1.5 * 2^52 + bias
  static constexpr int degree = 11;
  static constexpr double c[degree + 1] = {1.0,
                                           0.6931471805599453097758,
                                           0.2402265069591010611348,
                                           0.05550410866482166451906,
                                           0.009618129107603955263494,
                                           0.001333355814636675075137,
                                           0.0001540353044502216199406,
                                           0.0000152527339130390323567,
                                           0.000001321544116450523645517,
                                           1.017801290561524303419e-7,
                                           7.072794994496189244339e-9,
                                           4.464640138015143356166e-10};
};

/// 2^x for x <= 127 (float) or 1023 (double). Exactly 0 below -126.5 (-1022.5); NaN stays NaN.
template <class T>
DIFFATTN_INLINE vec<T> exp2(vec<T> x) noexcept {
  using k = exp2_constants<T>;
  x = at_least<T>(broadcast(-k::bias), x);
  vec<T> t, f;
  split<T>(x, broadcast(k::round), t, f);
  vec<T> p = broadcast(k::c[k::degree]);
  DIFFATTN_UNROLL
  for (int i = k::degree - 1; i >= 0; --i) p = fma<T>(p, f, broadcast(k::c[i]));
  return p * shift_bits_left<k::mantissa_bits>(t);
}

}  // namespace simd
DIFFATTN_ISA_NAMESPACE_END
