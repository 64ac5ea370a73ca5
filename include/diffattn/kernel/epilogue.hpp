// SPDX-License-Identifier: MIT
#pragma once

// What happens after the products: the mixing coefficients of the two maps, and the norm of a head's output.

#include <limits>

#include "../norm.hpp"
#include "../simd/transpose.hpp"
#include "tile.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// Lanes of s · x = x / l, and 0 where l is 0: a row without keys.
template <class T>
DIFFATTN_INLINE vec<T> inverse_or_zero(vec<T> l) noexcept {
  const vec<T> zero = simd::broadcast(T(0)), one = simd::broadcast(T(1));
  return simd::select<T>(l == zero, zero, one / l);
}

/// Coefficients of the unnormalised weights P₁, P₂ of sums l₁, l₂:  α P₁/l₁ - λ P₂/l₂ = s · (c₁ P₁ - c₂ P₂).
///
/// One of c₁, c₂ is exactly 1, that of the larger factor. So equal maps with equal factors cancel to exactly 0, λ = 0 leaves
/// P₁ untouched, and a huge or tiny ratio of the factors does not overflow. A map without keys (l = 0, weights 0) is left out.
template <class T>
DIFFATTN_INLINE void mix(vec<T> alpha, vec<T> lambda, vec<T> l1, vec<T> l2, vec<T>& c1, vec<T>& c2, vec<T>& s) noexcept {
  const vec<T> zero = simd::broadcast(T(0)), one = simd::broadcast(T(1));
  const auto first_leads = (l2 == zero) | ((l1 != zero) & (simd::abs<T>(alpha) >= simd::abs<T>(lambda)));
  const vec<T> lead = simd::select<T>(first_leads, alpha, lambda), other = simd::select<T>(first_leads, lambda, alpha);
  const vec<T> l_lead = simd::select<T>(first_leads, l1, l2), l_other = simd::select<T>(first_leads, l2, l1);
  const vec<T> ratio = simd::select<T>(lead == zero, zero, other / lead);
  const vec<T> c = simd::select<T>(l_other == zero, zero, ratio * (l_lead / l_other));
  c1 = simd::select<T>(first_leads, one, c);
  c2 = simd::select<T>(first_leads, c, one);
  s = lead * inverse_or_zero<T>(l_lead);
}

/// `mix` for one row: an output is scale · Σ (c1 · p1 - c2 · p2) v.
template <class T>
struct coefficients {
  T c1, c2, scale;
};
template <class T>
DIFFATTN_INLINE coefficients<T> mix_maps(T alpha, T lambda, T l1, T l2) noexcept {
  vec<T> c1, c2, s;
  mix<T>(simd::broadcast(alpha), simd::broadcast(lambda), simd::broadcast(l1), simd::broadcast(l2), c1, c2, s);
  T lane[3][simd::lanes<T>];
  simd::store(lane[0], c1), simd::store(lane[1], c2), simd::store(lane[2], s);
  return {lane[0][0], lane[1][0], lane[2][0]};
}
/// The same for one map by itself.
template <class T>
DIFFATTN_INLINE coefficients<T> take_map(T l) noexcept {
  T lane[simd::lanes<T>];
  simd::store(lane, inverse_or_zero<T>(simd::broadcast(l)));
  return {T(1), T(0), lane[0]};
}

/// Applies the norm to x[channel][lane] · s[lane] in place, channels [0, dv).
template <int Vectors, class T>
DIFFATTN_NOINLINE void normalise(T* x, index_t dv, const T* s, const head_norm<T>& norm) noexcept {
  constexpr int w = simd::lanes<T>;
  const vec<T> zero = simd::broadcast(T(0)), one = simd::broadcast(T(1));
  const vec<T> inverse_dv = simd::broadcast(T(1) / static_cast<T>(dv));
  for (int v = 0; v < Vectors; ++v) {
    T* const column = x + v * w;
    const vec<T> factor = simd::load(s + v * w);
    const auto at = [column, factor](index_t c) { return simd::load(column + c * Vectors * w) * factor; };
    // Σ f(x · s) over the channels in four chains, so that the latency of one addition is not that of all.
    const auto sum = [dv, zero, at](auto&& f) {
      vec<T> part[4] = {zero, zero, zero, zero};
      index_t c = 0;
      for (; c + 4 <= dv; c += 4) {
        DIFFATTN_UNROLL
        for (int i = 0; i < 4; ++i) part[i] = f(at(c + i), part[i]);
      }
      for (; c < dv; ++c) part[0] = f(at(c), part[0]);
      return (part[0] + part[1]) + (part[2] + part[3]);
    };
    vec<T> mean = zero, root = one;
    if (norm.kind == norm_kind::group) mean = sum([](vec<T> y, vec<T> acc) { return acc + y; }) * inverse_dv;
    if (norm.kind != norm_kind::none) {
      const vec<T> squares = sum([mean](vec<T> y, vec<T> acc) { return simd::fma<T>(y - mean, y - mean, acc); });
      root = simd::sqrt<T>(simd::fma<T>(squares, inverse_dv, simd::broadcast(norm.eps)));
      // Squares of values above 2^64 overflow float, those below 2^-63 lose bits, which shows where eps is as small: lanes
      // where they do are measured again in units of 2^80 or 2^-80 (2^±600). Squares and eps lie far within the range then.
      constexpr T unit = sizeof(T) == 4 ? T(0x1p80) : T(0x1p600), square = sizeof(T) == 4 ? T(0x1p-80) : T(0x1p-900);
      const auto large = squares == simd::broadcast(std::numeric_limits<T>::infinity());
      const auto small = (squares < simd::broadcast(square)) & (simd::broadcast(norm.eps) < simd::broadcast(square));
      if (simd::any<T>(large | small)) {
        const vec<T> factor_of = simd::select<T>(large, simd::broadcast(T(1) / unit), simd::broadcast(unit));
        const vec<T> scaled = sum([mean, factor_of](vec<T> y, vec<T> acc) {
          const vec<T> z = (y - mean) * factor_of;
          return simd::fma<T>(z, z, acc);
        });
        const vec<T> eps = simd::broadcast(norm.eps) * factor_of * factor_of;
        root = simd::select<T>(large | small, simd::sqrt<T>(simd::fma<T>(scaled, inverse_dv, eps)) / factor_of, root);
      }
      root = simd::select<T>(root == zero, one, root);  // eps = 0 and a zero output: 0 / 0 is defined as 0
    }
    const vec<T> inverse = one / root;
    for (index_t c = 0; c < dv; ++c) {
      vec<T> y = (at(c) - mean) * inverse;
      if (norm.weight) y = y * simd::broadcast(norm.weight[c]);
      if (norm.bias) y = y + simd::broadcast(norm.bias[c]);
      simd::store(column + c * Vectors * w, y * simd::broadcast(norm.gain));
    }
  }
}

/// The same for rows as users store them: scales and normalises `count` <= lanes rows in place, `step` apart. `lanes` has room
/// for dv registers.
template <class T>
DIFFATTN_INLINE void normalise_rows(T* rows, index_t step, index_t count, index_t dv, const T* scale, const head_norm<T>& norm,
                                    T* lanes) noexcept {
  constexpr index_t w = simd::lanes<T>;
  for (index_t e = 0; e < dv * w; ++e) lanes[e] = T(0);
  simd::transpose<simd::transpose_order::gather>(rows, step, count, dv, lanes, w, T(1));
  normalise<1>(lanes, dv, scale, norm);
  simd::transpose<simd::transpose_order::scatter>(lanes, w, dv, count, rows, step, T(1));
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
