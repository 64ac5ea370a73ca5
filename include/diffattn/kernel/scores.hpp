// SPDX-License-Identifier: MIT
#pragma once

// softmax(Q Kᵀ) without its division: weights 2^(score - shift) of one map for one group of queries, and their sum.
//
// Scores are in log2 units: q·k times scale · log2 e, less a `shift` near the maximum of the lane, in one multiply-add at the
// end of a tile. (A scaled query, or a sum that starts at -shift, would save it and round each product once more: at logits of
// 1e4 the results are a fifth worse.) The shift need not be the exact maximum: float has room for weights up to 2^rise_limit,
// so after the first keys it is raised only when a score exceeds it by more than that, which real data rarely does. A raise is
// a whole number of log2 units, so every rescaling is exact and the result does not depend on when it happens.

#include <limits>

#include "../simd/exp2.hpp"
#include "tile.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// How far a score may exceed the shift: weights below 2^16 leave 2^111 = 2.6e33 of float's range to the sums of values, that
/// is 2.6e33 / keys to each value in the worst case.
inline constexpr int rise_limit = 16;

/// Channels whose products are added up by themselves: the rounding error of a score grows with these and their number, not
/// with the width of a head.
inline constexpr index_t sum_channels = 32;

/// The running softmax of one map, a lane for each query.
template <class T, int Vectors>
struct softmax_state {
  static constexpr index_t lanes = group_lanes<T, Vectors>;
  T shift[lanes];  ///< log2 units; 0 until a key has been seen
  T sum[lanes];    ///< of the weights
  T lost[lanes];   ///< what the last addition to it rounded away, and is taken off the next
  T limit[lanes];  ///< scores - shift above this raise the shift: -inf until a key has been seen
  T top[lanes];    ///< maximum of scores - shift in the block at hand

  DIFFATTN_INLINE void reset() noexcept {
    for (index_t i = 0; i < lanes; ++i) shift[i] = sum[i] = lost[i] = 0, limit[i] = -std::numeric_limits<T>::infinity();
  }
};

/// scale · q·k - shift of `count` (1 … Keys) consecutive keys: x[key][lane]. With fewer than Keys the last key stands in for
/// the missing ones, so nothing beyond it is read. `ahead` is prefetched, one key row each.
template <int Vectors, int Keys, class T>
DIFFATTN_NOINLINE void score_tile(const T* q, const T* k, index_t k_stride, index_t count, index_t d, const T* ahead, T scale,
                                  const T* shift, softmax_state<T, Vectors>& state, T* x) noexcept {
  constexpr int w = simd::lanes<T>;
  const T* row[Keys];
  vec<T> acc[Keys][Vectors];
  DIFFATTN_UNROLL
  for (int j = 0; j < Keys; ++j) {
    row[j] = k + (j < count ? j : count - 1) * k_stride;
    DIFFATTN_UNROLL
    for (int v = 0; v < Vectors; ++v) acc[j][v] = simd::broadcast(T(0));
  }
  constexpr index_t line = 64 / sizeof(T);
  for (index_t i = 0; i < d; i += line) {
    DIFFATTN_UNROLL
    for (int j = 0; j < Keys; ++j) simd::prefetch(ahead + j * k_stride + i);
  }

  for (index_t i = 0; i < d;) {
    vec<T> part[Keys][Vectors];
    DIFFATTN_UNROLL
    for (int j = 0; j < Keys; ++j) {
      DIFFATTN_UNROLL
      for (int v = 0; v < Vectors; ++v) part[j][v] = simd::broadcast(T(0));
    }
    for (const index_t end = d - i < sum_channels ? d : i + sum_channels; i < end; ++i) {
      vec<T> query[Vectors];
      DIFFATTN_UNROLL
      for (int v = 0; v < Vectors; ++v) query[v] = simd::load_pinned(q + (i * Vectors + v) * w);
      DIFFATTN_UNROLL
      for (int j = 0; j < Keys; ++j) {
        const vec<T> key = simd::broadcast(row[j][i]);
        DIFFATTN_UNROLL
        for (int v = 0; v < Vectors; ++v) part[j][v] = simd::fma<T>(query[v], key, part[j][v]);
      }
    }
    DIFFATTN_UNROLL
    for (int j = 0; j < Keys; ++j) {
      DIFFATTN_UNROLL
      for (int v = 0; v < Vectors; ++v) acc[j][v] = acc[j][v] + part[j][v];
    }
  }
  const vec<T> factor = simd::broadcast(scale);
  vec<T> top[Vectors], less[Vectors];
  DIFFATTN_UNROLL
  for (int v = 0; v < Vectors; ++v) top[v] = simd::load(state.top + v * w), less[v] = -simd::load(shift + v * w);
  DIFFATTN_UNROLL
  for (int j = 0; j < Keys; ++j) {
    DIFFATTN_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      acc[j][v] = simd::fma<T>(acc[j][v], factor, less[v]);
      top[v] = simd::at_least<T>(acc[j][v], top[v]);
      if (j < count) simd::store(x + (j * Vectors + v) * w, acc[j][v]);
    }
  }
  DIFFATTN_UNROLL
  for (int v = 0; v < Vectors; ++v) simd::store(state.top + v * w, top[v]);
}

/// Gives the keys that a lane may not see the score -inf, whatever they held, and finds the maxima again.
template <int Vectors, class T>
DIFFATTN_NOINLINE void hide_keys(const visible_lanes<T, Vectors>& visible, index_t count, T* x,
                                 softmax_state<T, Vectors>& state) noexcept {
  constexpr int w = simd::lanes<T>;
  const vec<T> hidden = simd::broadcast(-std::numeric_limits<T>::infinity());
  for (int v = 0; v < Vectors; ++v) {
    const vec<T> begin = simd::load(visible.begin + v * w), end = simd::load(visible.end + v * w);
    vec<T> top = hidden;
    for (index_t j = 0; j < count; ++j) {
      const vec<T> key = simd::broadcast(static_cast<T>(j));
      T* const p = x + (j * Vectors + v) * w;
      const vec<T> score = simd::select<T>((key >= begin) & (key < end), simd::load(p), hidden);
      simd::store(p, score);
      top = simd::at_least<T>(score, top);
    }
    simd::store(state.top + v * w, top);
  }
}

/// Does some lane's block maximum exceed its limit?
template <int Vectors, class T>
DIFFATTN_INLINE bool rises(const softmax_state<T, Vectors>& state) noexcept {
  constexpr int w = simd::lanes<T>;
  bool any = false;
  for (int v = 0; v < Vectors; ++v) any |= simd::any<T>(simd::load(state.top + v * w) > simd::load(state.limit + v * w));
  return any;
}

/// Raises the shift of every lane whose block maximum exceeds the limit. All that the lane has
/// accumulated so far, the sum, `rows` × Vectors registers at `weights` and `channels` × Vectors at `out`, is scaled down to
/// match. Rare, so out of line.
template <int Vectors, class T>
DIFFATTN_NOINLINE void raise_shift(softmax_state<T, Vectors>& state, T* x, index_t count, T* weights, index_t rows, T* out,
                                   index_t channels) noexcept {
  constexpr int w = simd::lanes<T>;
  const vec<T> zero = simd::broadcast(T(0)), one = simd::broadcast(T(1));
  for (int v = 0; v < Vectors; ++v) {
    const vec<T> top = simd::load(state.top + v * w), limit = simd::load(state.limit + v * w);
    const auto rises = top > limit;
    // The first keys have nothing to rescale, so the shift may be their maximum itself: the weight of a row's only key is then
    // exactly 1, and two such maps cancel exactly. Later it moves by whole units.
    const vec<T> step = simd::select<T>(rises, simd::select<T>(limit > zero, simd::nearest<T>(top), top), zero);
    // A lane that has seen no key has accumulated zeros: any factor would do, but 2^(-step) may overflow.
    const vec<T> factor = simd::select<T>(limit > zero, simd::exp2<T>(zero - step), one);
    for (index_t j = 0; j < count; ++j) {
      T* const p = x + (j * Vectors + v) * w;
      simd::store(p, simd::load(p) - step);
    }
    for (index_t j = 0; j < rows; ++j) {
      T* const p = weights + (j * Vectors + v) * w;
      simd::store(p, simd::load(p) * factor);
    }
    for (index_t c = 0; c < channels; ++c) {
      T* const p = out + (c * Vectors + v) * w;
      simd::store(p, simd::load(p) * factor);
    }
    simd::store(state.sum + v * w, simd::load(state.sum + v * w) * factor);
    simd::store(state.lost + v * w, simd::load(state.lost + v * w) * factor);
    simd::store(state.shift + v * w, simd::load(state.shift + v * w) + step);
    simd::store(state.limit + v * w, simd::select<T>(rises, simd::broadcast(T(rise_limit)), limit));
  }
}

/// Scores at x, whose maxima are in state.top, become scores - shift, the shift raised where that is due. Rules may change a
/// score by more than a float can tell from the old shift; then what was accumulated is nothing beside it, and the new shift is
/// the maximum itself.
template <int Vectors, class T>
DIFFATTN_NOINLINE void subtract_shift(softmax_state<T, Vectors>& state, T* x, index_t count, T* weights, index_t rows, T* out,
                                      index_t channels) noexcept {
  constexpr int w = simd::lanes<T>;
  constexpr T far = T(1 << 20);  // beyond it, steps of 1 vanish beside scores of float
  T top[softmax_state<T, Vectors>::lanes];
  for (int v = 0; v < Vectors; ++v) {
    const vec<T> score = simd::load(state.top + v * w);
    simd::store(top + v * w, score);
    simd::store(state.top + v * w, score - simd::load(state.shift + v * w));
  }
  if (rises(state)) {
    raise_shift<Vectors>(state, x, 0, weights, rows, out, channels);
    for (int v = 0; v < Vectors; ++v) {
      const auto is_far = simd::load(state.top + v * w) > simd::broadcast(far);
      simd::store(state.shift + v * w, simd::select<T>(is_far, simd::load(top + v * w), simd::load(state.shift + v * w)));
    }
  }
  for (index_t j = 0; j < count; ++j)
    for (int v = 0; v < Vectors; ++v) {
      T* const p = x + (j * Vectors + v) * w;
      simd::store(p, simd::load(p) - simd::load(state.shift + v * w));
    }
}

/// Four keys' scores become weights where they lie; key j is added to chain j.
template <int Vectors, class T>
DIFFATTN_INLINE void weigh_keys(T* x, vec<T> (&sum)[4][Vectors]) noexcept {
  constexpr int w = simd::lanes<T>;
  DIFFATTN_UNROLL
  for (int j = 0; j < 4; ++j) {
    DIFFATTN_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      T* const p = x + (j * Vectors + v) * w;
      const vec<T> weight = simd::exp2<T>(simd::load(p));
      simd::store(p, weight);
      sum[j][v] = sum[j][v] + weight;
    }
  }
}

/// Turns the scores of keys [first, first + count) into weights where they lie and adds them to the sums. Key j goes into
/// chain j mod 4, whatever the number of registers and wherever a block begins: a row's sum does not depend on its neighbours.
/// Blocks are added up with compensation (Kahan): 2048 of them would cost three digits of the difference of nearly equal maps.
template <int Vectors, class T>
DIFFATTN_NOINLINE void exponentials(T* x, index_t first, index_t count, softmax_state<T, Vectors>& state) noexcept {
  constexpr int w = simd::lanes<T>;
  constexpr index_t chains = 4, row = Vectors * w;
  vec<T> sum[chains][Vectors];
  DIFFATTN_UNROLL
  for (int j = 0; j < chains; ++j) {
    DIFFATTN_UNROLL
    for (int v = 0; v < Vectors; ++v) sum[j][v] = simd::broadcast(T(0));
  }
  // Four keys that begin before the block or end after it: -inf, weight 0, stands for the keys that are not there.
  const auto partial = [&](index_t key) {
    T four[chains * row];
    for (index_t e = 0; e < chains * row; ++e) {
      const index_t at = key * row + e;
      four[e] = at >= 0 && at < count * row ? x[at] : -std::numeric_limits<T>::infinity();
    }
    weigh_keys<Vectors>(four, sum);
    for (index_t e = 0; e < chains * row; ++e)
      if (key * row + e >= 0 && key * row + e < count * row) x[key * row + e] = four[e];
  };
  index_t key = -(first % chains);
  if (key < 0) partial(key), key += chains;
  for (; key + chains <= count; key += chains) weigh_keys<Vectors>(x + key * row, sum);
  if (key < count) partial(key);
  DIFFATTN_UNROLL
  for (int v = 0; v < Vectors; ++v) {
    const vec<T> total = (sum[0][v] + sum[2][v]) + (sum[1][v] + sum[3][v]);
    const vec<T> sum_before = simd::load(state.sum + v * w), exact = total - simd::load(state.lost + v * w);
    const vec<T> sum_now = sum_before + exact;
    const auto none =
        total == simd::broadcast(T(0));  // a block that a lane does not see, which others may skip, changes nothing
    simd::store(state.lost + v * w, simd::select<T>(none, simd::load(state.lost + v * w), (sum_now - sum_before) - exact));
    simd::store(state.sum + v * w, simd::select<T>(none, sum_before, sum_now));
  }
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
