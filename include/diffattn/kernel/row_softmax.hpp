// SPDX-License-Identifier: MIT
#pragma once

// The softmax of one query row over a part of its keys, keys in lanes, and how the parts of a row are put together.
//
// Each part has its own shift, near its maximum: weights are 2^(score - shift). Parts are merged as log-sum-exp states: with M
// the largest shift, a part's weights count 2^(shift - M). Among several parts shifts are whole numbers, so these factors are
// exact and equal maps still cancel exactly; a row whose keys lie in one part takes the maximum itself, so that the weight of
// a row's only key is exactly 1.

#include <cmath>
#include <limits>

#include "../simd/exp2.hpp"
#include "tile.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// Turns the scores x[begin … end) of one row into weights where they lie. `whole`: these are all keys of the row. What lies
/// around them, up to a whole register, is overwritten.
template <class T>
DIFFATTN_NOINLINE void row_weights(T* x, index_t begin, index_t end, bool whole, T& shift, T& sum) noexcept {
  constexpr index_t w = simd::lanes<T>, chains = 4;
  constexpr T none = -std::numeric_limits<T>::infinity();
  shift = none, sum = T(0);
  if (begin >= end) return;
  const index_t from = begin / w * w, to = round_up(end, w);
  for (index_t j = from; j < begin; ++j) x[j] = none;
  for (index_t j = end; j < to; ++j) x[j] = none;

  vec<T> part[chains];
  for (vec<T>& p : part) p = simd::broadcast(none);
  index_t j = from;
  for (; j + chains * w <= to; j += chains * w) {
    DIFFATTN_UNROLL
    for (int c = 0; c < chains; ++c) part[c] = simd::at_least<T>(simd::load(x + j + c * w), part[c]);
  }
  for (; j < to; j += w) part[0] = simd::at_least<T>(simd::load(x + j), part[0]);
  T lane[chains * w], top = none;
  for (int c = 0; c < chains; ++c) simd::store(lane + c * w, part[c]);
  for (const T& t : lane)
    if (t > top) top = t;
  shift = whole ? top : std::nearbyint(top);

  // A register goes into the chain of its place in the part, whatever the row sees before it.
  for (vec<T>& p : part) p = simd::broadcast(T(0));
  const vec<T> offset = simd::broadcast(top == none ? T(0) : shift);  // all logits −∞: weights 0
  for (j = from; j < to; j += w) {
    const vec<T> weight = simd::exp2<T>(simd::load(x + j) - offset);
    simd::store(x + j, weight);
    part[j / w % chains] = part[j / w % chains] + weight;
  }
  simd::store(lane, (part[0] + part[2]) + (part[1] + part[3]));
  for (index_t half = w / 2; half > 0; half /= 2)
    for (index_t i = 0; i < half; ++i) lane[i] += lane[i + half];
  sum = lane[0];
}

/// Σ weights of a whole row, relative to its largest shift.
template <class T>
struct row_total {
  T sum = 0, shift = 0;
  /// ln Σ exp(logit), −∞ without keys.
  DIFFATTN_INLINE T log_sum_exp() const noexcept { return (shift + std::log2(sum)) * T(0.693147180559945309417); }
};

/// Merges the parts of a row. shift[part] becomes the factor of the part's weights.
template <class T>
DIFFATTN_INLINE row_total<T> merge_parts(T* shift, const T* sum, index_t parts) noexcept {
  constexpr T none = -std::numeric_limits<T>::infinity();
  T top = none;
  for (index_t p = 0; p < parts; ++p)
    if (shift[p] > top) top = shift[p];
  row_total<T> total;
  total.shift = top == none ? T(0) : top;
  for (index_t p = 0; p < parts; ++p) {
    T factor[simd::lanes<T>] = {};  // of a part without keys: 0, but a sum that is NaN stays so
    if (shift[p] != none) simd::store(factor, simd::exp2<T>(simd::broadcast(shift[p] - top)));
    shift[p] = factor[0];
    total.sum += sum[p] * factor[0];
  }
  return total;
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
