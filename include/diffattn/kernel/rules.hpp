// SPDX-License-Identifier: MIT
#pragma once

// What logits.hpp describes, done to scores: which keys are hidden, and one function that changes a register of scores, be its
// lanes queries (panels) or keys (stream). Scores are in log2 units here: multiplied by log2 e.

#include <limits>

#include "../logits.hpp"
#include "../simd/tanh.hpp"
#include "tile.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

inline constexpr double log2_e = 1.44269504088896340736;

/// The rules of one map for one output head of one batch entry. Null rules: none.
template <class T>
struct head_rules {
  const logit_rules<T>* rules = nullptr;
  index_t b = 0, head = 0;

  /// Are the scores of a tile of which the rules show `shown` to be edited?
  DIFFATTN_INLINE bool edits(sight shown) const noexcept { return rules && (shown == sight::some || rules->changes()); }
  /// Those of any tile? All are shifted alike then: a row must not depend on what the rules show its neighbours.
  DIFFATTN_INLINE bool may_edit() const noexcept { return rules && (rules->hides() || rules->changes()); }
  /// Log2 units, where a finite one stays finite, as a bias does; −∞: none.
  DIFFATTN_INLINE T sink() const noexcept {
    constexpr T none = -std::numeric_limits<T>::infinity(), most = std::numeric_limits<T>::max();
    const T sink = rules && rules->sinks ? rules->sinks[head] : none, scaled = sink * static_cast<T>(log2_e);
    if (scaled > most && sink <= most) return most;
    return scaled < -most && sink >= -most ? -most : scaled;
  }
};

DIFFATTN_INLINE sight least(sight a, sight b) noexcept {
  return a < b ? a : b;
}

/// What block lists show queries first … last of `keys`.
DIFFATTN_INLINE sight sight_of_blocks(const block_list& list, index_t b, index_t head, index_t first, index_t last,
                                      key_range keys) noexcept {
  const index_t low = keys.begin / list.key_block, high = (keys.end - 1) / list.key_block;
  bool some = false, all = true;
  for (index_t query = first; query <= last; query = (query / list.query_block + 1) * list.query_block) {
    const index_t* const row = list.row(b, head, query);
    index_t at = row[0], end = row[1];
    for (index_t behind = end; at < behind;) {  // the first block that is not below `low`
      const index_t middle = at + (behind - at) / 2;
      if (list.keys[middle] < low)
        at = middle + 1;
      else
        behind = middle;
    }
    index_t found = 0;
    for (; at < end && list.keys[at] <= high; ++at) ++found;
    some |= found > 0, all &= found == high - low + 1;
  }
  return all ? sight::all : some ? sight::some : sight::none;
}

/// How many of n elements are x? n is at most that of a tile, so a counter as wide as the elements does not overflow, and keeps
/// them in as many lanes.
template <class E>
DIFFATTN_INLINE index_t count_equal(const E* row, index_t stride, index_t n, E x) noexcept {
  std::conditional_t<sizeof(E) == 1, unsigned char, std::conditional_t<sizeof(E) == 4, std::int32_t, std::int64_t>> found = 0;
  if (stride == 1) {  // a constant stride makes vectors of this
    for (index_t j = 0; j < n; ++j) found = static_cast<decltype(found)>(found + (row[j] == x));
    return found;
  }
  for (index_t j = 0; j < n; ++j) found = static_cast<decltype(found)>(found + (row[j * stride] == x));
  return found;
}

/// Does an array show all keys of a tile, none, or some? Stops as soon as that is clear.
template <class E>
DIFFATTN_INLINE sight sight_of_array(const logit_view<E>& v, index_t b, index_t head, index_t first, index_t last,
                                     key_range keys, E hidden) noexcept {
  bool shown = false, hides = false;
  for (index_t query = first; query <= last && !(shown && hides); ++query) {
    const index_t n = count_equal(v.at(b, head, query, keys.begin), v.key_stride, keys.end - keys.begin, hidden);
    hides |= n > 0, shown |= n < keys.end - keys.begin;
    if (v.query_stride == 0) break;
  }
  return !hides ? sight::all : shown ? sight::some : sight::none;
}

/// What the rules show queries first … last (included) of `keys`, not empty: `none` and `all` are certain.
template <class T>
DIFFATTN_INLINE sight sight_of(const head_rules<T>& r, index_t first, index_t last, key_range keys) noexcept {
  if (!r.rules || !r.rules->hides()) return sight::all;
  const logit_rules<T>& rules = *r.rules;
  sight s = sight::all;
  if (rules.blocks.begins) s = sight_of_blocks(rules.blocks, r.b, r.head, first, last, keys);
  if (s != sight::none && rules.predicate.sees)
    s = least(
        s, rules.predicate.tile ? rules.predicate.tile(rules.predicate.context, r.b, r.head, first, last, keys) : sight::some);
  if (s != sight::none && rules.visible.data)
    s = least(s, sight_of_array(rules.visible, r.b, r.head, first, last, keys, static_cast<unsigned char>(0)));
  if (s != sight::none && rules.bias.data)
    s = least(s, sight_of_array(rules.bias, r.b, r.head, first, last, keys, -std::numeric_limits<T>::infinity()));
  return s;
}

/// Writes −∞ to x[(key - keys.begin) · step] for the keys that the rules hide from one query, and leaves the others.
template <class T>
inline void hide_from_row(const head_rules<T>& r, index_t query, key_range keys, T* x, index_t step) noexcept {
  constexpr T hidden = -std::numeric_limits<T>::infinity();
  const logit_rules<T>& rules = *r.rules;
  const index_t n = keys.end - keys.begin;
  if (rules.bias.data) {
    const T* const row = rules.bias.at(r.b, r.head, query, keys.begin);
    for (index_t j = 0; j < n; ++j)
      if (row[j * rules.bias.key_stride] == hidden) x[j * step] = hidden;
  }
  if (rules.visible.data) {
    const unsigned char* const row = rules.visible.at(r.b, r.head, query, keys.begin);
    for (index_t j = 0; j < n; ++j)
      if (row[j * rules.visible.key_stride] == 0) x[j * step] = hidden;
  }
  if (rules.blocks.begins)
    for (key_range block = keys; block.begin < keys.end; block.begin = block.end) {
      block.end = (block.begin / rules.blocks.key_block + 1) * rules.blocks.key_block;
      if (block.end > keys.end) block.end = keys.end;
      if (sight_of_blocks(rules.blocks, r.b, r.head, query, query, block) == sight::none)
        for (index_t j = block.begin; j < block.end; ++j) x[(j - keys.begin) * step] = hidden;
    }
  if (const mask_predicate& p = rules.predicate; p.sees)
    for (key_range tile = keys; tile.begin < keys.end; tile.begin = tile.end) {
      tile.end = (tile.begin / softmax_keys + 1) * softmax_keys;
      if (tile.end > keys.end) tile.end = keys.end;
      const sight shown = p.tile ? p.tile(p.context, r.b, r.head, query, query, tile) : sight::some;
      for (index_t j = tile.begin; shown != sight::all && j < tile.end; ++j)
        if (shown == sight::none || !p.sees(p.context, r.b, r.head, query, j)) x[(j - keys.begin) * step] = hidden;
    }
}

/// Changes registers of scores by the rules of a head.
template <class T>
class score_editor {
 public:
  DIFFATTN_INLINE explicit score_editor(const head_rules<T>& r) noexcept
      : capped_(r.rules->soft_cap != T(0)), biased_(r.rules->bias.data != nullptr) {
    if (capped_) cap_ = r.rules->soft_cap * static_cast<T>(log2_e);
    if (r.rules->slopes) slope_ = r.rules->slopes[r.head] * static_cast<T>(log2_e);
  }

  /// `distance`: own position minus key. `bias` in natural units; −∞ hides. Read only if the rules have them.
  DIFFATTN_INLINE vec<T> edit(vec<T> score, vec<T> distance, vec<T> bias) const noexcept {
    if (capped_) score = simd::broadcast(cap_) * simd::tanh<T>(score / simd::broadcast(cap_));
    if (slope_ != T(0)) score = simd::fnma<T>(simd::broadcast(slope_), simd::abs<T>(distance), score);
    if (!biased_) return score;
    // A bias near ±max, which finite masks use, would overflow in log2 units.
    const vec<T> most = simd::broadcast(std::numeric_limits<T>::max()), least = simd::broadcast(-std::numeric_limits<T>::max());
    const vec<T> none = simd::broadcast(-std::numeric_limits<T>::infinity());
    vec<T> b = bias * simd::broadcast(static_cast<T>(log2_e));
    b = simd::select<T>((b > most) & (bias <= most), most, b), b = simd::select<T>((b < least) & (bias >= least), least, b);
    return simd::select<T>(bias == none, none, score + b);
  }
  DIFFATTN_INLINE bool has_bias() const noexcept { return biased_; }

 private:
  bool capped_, biased_;
  T cap_ = T(0), slope_ = T(0);
};

/// Adds a sink to the softmax of a row: `sum` of weights relative to `shift`, 0 if the row has seen no key. A sink that is
/// 2^100 times (2^900) all keys together counts as just that, so that nothing overflows; the log-sum-exp is right all the same,
/// up to the rounding of a number of that size (4e-6 in float).
template <class T>
DIFFATTN_INLINE void add_sink(T sink, T& sum, T& shift) noexcept {
  constexpr T most = sizeof(T) == 4 ? T(100) : T(900);
  if (sink == -std::numeric_limits<T>::infinity()) return;
  if (sum == T(0)) {
    sum = T(1), shift = sink;
  } else if (sink - shift > most) {
    sum = sum - sum + static_cast<T>(sizeof(T) == 4 ? 0x1p100 : 0x1p900), shift = sink - most;  // NaN stays
  } else {
    T lane[simd::lanes<T>];
    simd::store(lane, simd::exp2<T>(simd::broadcast(sink - shift)));
    sum += lane[0];
  }
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
