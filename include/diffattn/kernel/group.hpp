// SPDX-License-Identifier: MIT
#pragma once

// One group of query rows on its way through a block: what it must remember, and the steps of the algorithm for it.

#include <cmath>

#include "../mask.hpp"
#include "../simd/transpose.hpp"
#include "epilogue.hpp"
#include "rules.hpp"
#include "scores.hpp"
#include "values.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// One block's work. Pointers are to the first row; strides are between tokens.
template <class T>
struct block_job {
  const T* q[2];
  const T* k[2];  ///< key `first_key`
  index_t first_key;
  index_t q_stride, k_stride;
  index_t rows, d, dv;
  T scale;                   ///< of the scores in log2 units: scale · log2 e
  const key_range* visible;  ///< [rows], both ends non-decreasing
  index_t first_query;       ///< number of the first row
  const index_t* own;        ///< [rows] place of each row among the keys; only for rules with slopes
  head_rules<T> rules[2];
  const T* packed;     ///< packed chunk `first_chunk`
  const bool* finite;  ///< of each packed chunk: no infinite or NaN value
  index_t first_chunk;
  const T* alpha;   ///< [rows]
  const T* lambda;  ///< [rows]
  head_norm<T> norm;
  T* out;
  index_t out_stride;
  T* raw[2];  ///< softmax · V of each map, or null
  index_t raw_stride[2];
  T* lse[2];  ///< natural log-sum-exp of each map, or null
  index_t lse_stride[2];
};

/// Channels of the output accumulators: whole pairs of panels, for the tiles of one vector.
constexpr index_t padded_channels(index_t dv) noexcept {
  return round_up(dv, 2 * panel_channels);
}

template <int Maps, int Vectors, class T>
class group {
 public:
  static constexpr index_t lanes = group_lanes<T, Vectors>;

  /// Takes rows [first, first + lanes) of the block, as far as there are any, and packs their queries. `queries` has room for
  /// Maps · d · lanes, `out` for 2 · padded_channels · lanes.
  DIFFATTN_INLINE void start(const block_job<T>& job, index_t first, T* queries, T* out) noexcept {
    first_ = first, rows_ = job.rows - first < lanes ? job.rows - first : lanes;
    const key_range &top = job.visible[first], &bottom = job.visible[first + rows_ - 1];
    some_ = {top.begin, bottom.end}, all_ = {bottom.begin, top.end};
    queries_ = queries, out_ = out;
    for (int map = 0; map < Maps; ++map) {
      T* const q = queries + map * job.d * lanes;
      if (rows_ < lanes)
        for (index_t e = 0; e < job.d * lanes; e += simd::lanes<T>) simd::store(q + e, simd::broadcast(T(0)));
      simd::transpose<simd::transpose_order::gather>(job.q[map] + first * job.q_stride, job.q_stride, rows_, job.d, q, lanes,
                                                     T(1));
      softmax_[map].reset();
    }
    clear(job);
  }

  /// Begins an output.
  DIFFATTN_INLINE void clear(const block_job<T>& job) noexcept {
    for (index_t e = 0; e < 2 * padded_channels(job.dv) * lanes; e += simd::lanes<T>)
      simd::store(out_ + e, simd::broadcast(T(0)));
  }
  /// Adds the output so far to that of the spans before, and begins the next one. (With one span: the sum and 0 change places.)
  DIFFATTN_INLINE void close_span(const block_job<T>& job) noexcept {
    const index_t size = padded_channels(job.dv) * lanes;
    for (index_t e = 0; e < size; e += simd::lanes<T>) {
      simd::store(out_ + size + e, simd::load(out_ + size + e) + simd::load(out_ + e));
      simd::store(out_ + e, simd::broadcast(T(0)));
    }
  }

  /// The keys of [begin, end) that some row sees.
  DIFFATTN_INLINE key_range seen(index_t begin, index_t end) const noexcept {
    return {begin > some_.begin ? begin : some_.begin, end < some_.end ? end : some_.end};
  }

  /// May the rules of a map hide keys?
  static DIFFATTN_INLINE bool hides(const block_job<T>& job, int map) noexcept {
    return job.rules[map].rules && job.rules[map].rules->hides();
  }
  /// What they show of `keys`.
  DIFFATTN_INLINE sight sees(const block_job<T>& job, int map, key_range keys) const noexcept {
    return sight_of(job.rules[map], job.first_query + first_, job.first_query + first_ + rows_ - 1, keys);
  }

  /// Weights of one map for `keys`, which lie in one softmax block, to x. Where the shift is raised, the `kept` rows of weights
  /// before x and (if `rescale_out`) the output so far follow.
  DIFFATTN_INLINE void weigh(const block_job<T>& job, int map, key_range keys, sight shown, T* x, index_t kept,
                             bool rescale_out) noexcept {
    constexpr int tile = tile_keys<Vectors>;
    constexpr T zeros[lanes] = {};
    const bool may_edit = job.rules[map].may_edit();
    const index_t count = keys.end - keys.begin, stride = job.k_stride;
    const T* const q = queries_ + map * job.d * lanes;
    softmax_state<T, Vectors>& state = softmax_[map];
    for (index_t i = 0; i < lanes; ++i) state.top[i] = -std::numeric_limits<T>::infinity();
    const T* k = job.k[map] + (keys.begin - job.first_key) * stride;
    index_t key = 0;
    for (; key + tile <= count; key += tile, k += tile * stride)
      score_tile<Vectors, tile>(q, k, stride, tile, job.d, k + tile * stride, job.scale, may_edit ? zeros : state.shift, state,
                                x + key * lanes);
    if (key < count)
      score_tile<Vectors, tile>(q, k, stride, count - key, job.d, k, job.scale, may_edit ? zeros : state.shift, state,
                                x + key * lanes);
    if (job.rules[map].edits(shown)) edit(job, map, keys, shown, x);
    if (!all_see(keys)) hide_keys<Vectors>(visible_of(job, keys), count, x, state);
    const index_t channels = rescale_out ? 2 * padded_channels(job.dv) : 0;
    if (may_edit)
      subtract_shift<Vectors>(state, x, count, x - kept * lanes, kept, out_, channels);
    else if (rises(state))
      raise_shift<Vectors>(state, x, count, x - kept * lanes, kept, out_, channels);
    exponentials<Vectors>(x, keys.begin, count, state);
  }

  /// The sums of a map are complete but for its sinks.
  DIFFATTN_INLINE void add_sinks(const block_job<T>& job, int map) noexcept {
    const T sink = job.rules[map].sink();
    for (index_t i = 0; i < lanes; ++i) add_sink(sink, softmax_[map].sum[i], softmax_[map].shift[i]);
  }

  /// Output += weights · V for `keys`, which lie in one chunk; weights[0] belongs to keys.begin, and they are those of maps
  /// first_map … last_map. Meanwhile the next chunk's weights, at `ahead_1` and `ahead_2` unless null, come into L2: to combine
  /// them is a short burst of reads.
  DIFFATTN_INLINE void add_values(const block_job<T>& job, const T* weights, key_range keys, int first_map, int last_map,
                                  const T* ahead_1, const T* ahead_2) noexcept {
    constexpr int tile_panels = 2 / Vectors;
    const index_t chunk = keys.begin / chunk_keys, count = keys.end - keys.begin;
    const index_t panels = (job.dv + panel_channels - 1) / panel_channels;
    const T* const values = job.packed + (chunk - job.first_chunk) * packed_chunk_size<T>(job.dv) +
                            (keys.begin - chunk * chunk_keys) * panel_channels;
    const auto tiles = [&](auto tile, auto hides, index_t from, const T* hidden) {
      index_t panel = from;
      for (; panel + tile() <= panels; panel += tile()) {
        if (ahead_1) prefetch_part(ahead_1, panel, tile(), panels), prefetch_part(ahead_2, panel, tile(), panels);
        value_tile<Vectors, tile(), hides()>(weights, values + panel * panel_step<T>, count, hidden,
                                             out_ + panel * panel_channels * lanes);
      }
      return panel;
    };
    const bool rules_hide = hides(job, first_map) || hides(job, last_map);
    if (job.finite[chunk - job.first_chunk] || (all_see(keys) && !rules_hide)) {
      const index_t rest = tiles(constant<tile_panels>{}, constant<false>{}, 0, nullptr);
      tiles(constant<1>{}, constant<false>{}, rest, nullptr);
    } else {
      T hidden[chunk_keys * lanes];
      find_hidden(job, keys, first_map, last_map, hidden);
      tiles(constant<1>{}, constant<true>{}, 0, hidden);
    }
  }

  /// The coefficients of both maps, once their sums are complete.
  DIFFATTN_INLINE void mix_maps(const block_job<T>& job) noexcept {
    T alpha[lanes], lambda[lanes];
    for (index_t i = 0; i < lanes; ++i) alpha[i] = job.alpha[row_of(i)], lambda[i] = job.lambda[row_of(i)];
    for (index_t i = 0; i < lanes; i += simd::lanes<T>) {
      vec<T> c1, c2, s;
      mix<T>(simd::load(alpha + i), simd::load(lambda + i), simd::load(softmax_[0].sum + i),
             simd::load(softmax_[Maps - 1].sum + i), c1, c2, s);
      simd::store(c1_ + i, c1), simd::store(c2_ + i, c2), simd::store(scale_ + i, s);
    }
  }
  /// The one coefficient of a map by itself.
  DIFFATTN_INLINE void take_map(int map) noexcept {
    for (index_t i = 0; i < lanes; i += simd::lanes<T>)
      simd::store(scale_ + i, inverse_or_zero<T>(simd::load(softmax_[map].sum + i)));
  }
  /// Weights of both maps, combined.
  DIFFATTN_INLINE const T* combine_maps(const T* weights_1, const T* weights_2, key_range keys, T* combined) const noexcept {
    combine<Vectors>(weights_1, weights_2, c1_, c2_, keys.end - keys.begin, combined);
    return combined;
  }

  /// Scales, normalises and stores the output.
  DIFFATTN_INLINE void finish(const block_job<T>& job, const head_norm<T>& norm, T* to, index_t stride) noexcept {
    close_span(job);
    T* const out = out_ + padded_channels(job.dv) * lanes;
    normalise<Vectors>(out, job.dv, scale_, norm);
    simd::transpose<simd::transpose_order::scatter>(out, lanes, job.dv, rows_, to + first_ * stride, stride, T(1));
  }
  /// ln Σ exp(logit) of one map, −∞ for rows without keys.
  DIFFATTN_INLINE void store_log_sum_exp(int map, T* to, index_t stride) const noexcept {
    constexpr T ln_2 = T(0.693147180559945309417);
    for (index_t i = 0; i < rows_; ++i)
      to[(first_ + i) * stride] = (softmax_[map].shift[i] + std::log2(softmax_[map].sum[i])) * ln_2;
  }

 private:
  template <auto Value>
  using constant = std::integral_constant<decltype(Value), Value>;

  /// hidden[key][lane]: 0 if the lane sees the key in one of the maps.
  DIFFATTN_NOINLINE void find_hidden(const block_job<T>& job, key_range keys, int first_map, int last_map,
                                     T* hidden) const noexcept {
    const index_t count = keys.end - keys.begin;
    for (index_t i = 0; i < lanes; ++i) {
      const key_range& row = job.visible[row_of(i)];
      T maps[2][chunk_keys] = {};
      for (int m = first_map; m <= last_map; ++m)
        if (hides(job, m)) hide_from_row(job.rules[m], job.first_query + row_of(i), keys, maps[m], 1);
      for (index_t j = 0; j < count; ++j) {
        const bool outside = keys.begin + j < row.begin || keys.begin + j >= row.end;
        const bool by_rules = maps[first_map][j] != T(0) && maps[last_map][j] != T(0);
        hidden[j * lanes + i] = outside || by_rules ? T(1) : T(0);
      }
    }
  }

  /// Makes of the scores at x, in log2 units, what the rules of a map say; −∞ for the keys that they hide. Finds the maxima.
  DIFFATTN_NOINLINE void edit(const block_job<T>& job, int map, key_range keys, sight shown, T* x) noexcept {
    constexpr int w = simd::lanes<T>;
    const head_rules<T>& r = job.rules[map];
    const score_editor<T> editor(r);
    const index_t count = keys.end - keys.begin, query = job.first_query + first_;
    T own[lanes] = {}, bias[softmax_keys * lanes], hidden[softmax_keys * lanes];
    // From a place that does not depend on what the rows see, since a float may not hold the distance.
    const index_t origin = keys.begin / softmax_keys * softmax_keys;
    if (r.rules->slopes)
      for (index_t i = 0; i < lanes; ++i) own[i] = static_cast<T>(job.own[row_of(i)] - origin);
    if (const logit_view<T>& v = r.rules->bias; v.data) {
      if (rows_ < lanes)
        for (index_t e = 0; e < count * lanes; ++e) bias[e] = T(0);
      if (v.key_stride == 1)
        simd::transpose<simd::transpose_order::gather>(v.at(r.b, r.head, query, keys.begin), v.query_stride, rows_, count, bias,
                                                       lanes, T(1));
      else
        for (index_t i = 0; i < rows_; ++i)
          for (index_t j = 0; j < count; ++j) bias[j * lanes + i] = *v.at(r.b, r.head, query + i, keys.begin + j);
    }
    if (shown == sight::some) {
      for (index_t e = 0; e < count * lanes; ++e) hidden[e] = T(0);
      for (index_t i = 0; i < rows_; ++i) hide_from_row(r, query + i, keys, hidden + i, lanes);
    }
    const vec<T> zero = simd::broadcast(T(0)), none = simd::broadcast(-std::numeric_limits<T>::infinity());
    for (int v = 0; v < Vectors; ++v) {
      vec<T> top = none;
      for (index_t j = 0; j < count; ++j) {
        const index_t at = (j * Vectors + v) * w;
        const vec<T> distance = simd::load(own + v * w) - simd::broadcast(static_cast<T>(keys.begin - origin + j));
        vec<T> score = editor.edit(simd::load(x + at), distance, editor.has_bias() ? simd::load(bias + at) : zero);
        if (shown == sight::some) score = simd::select<T>(simd::load(hidden + at) == zero, score, none);
        simd::store(x + at, score);
        top = simd::at_least<T>(score, top);
      }
      simd::store(softmax_[map].top + v * w, top);
    }
  }

  DIFFATTN_INLINE bool all_see(key_range keys) const noexcept { return all_.begin <= keys.begin && keys.end <= all_.end; }
  /// Lanes without a row do as the last row does.
  DIFFATTN_INLINE index_t row_of(index_t lane) const noexcept { return first_ + (lane < rows_ ? lane : rows_ - 1); }

  DIFFATTN_INLINE visible_lanes<T, Vectors> visible_of(const block_job<T>& job, key_range keys) const noexcept {
    const auto position = [keys](index_t key) {
      return static_cast<T>((key < keys.begin ? keys.begin : key < keys.end ? key : keys.end) - keys.begin);
    };
    visible_lanes<T, Vectors> visible;
    for (index_t i = 0; i < lanes; ++i) {
      const key_range& row = job.visible[row_of(i)];
      visible.begin[i] = position(row.begin), visible.end[i] = position(row.end);
    }
    return visible;
  }

  /// Panels [panel, panel + tile) of `panels` fetch their share of a chunk's weights.
  static DIFFATTN_INLINE void prefetch_part(const T* weights, index_t panel, index_t tile, index_t panels) noexcept {
    constexpr index_t size = chunk_keys * lanes, line = 64 / sizeof(T);
    for (index_t e = panel * size / panels; e < (panel + tile) * size / panels; e += line) simd::prefetch_to_l2(weights + e);
  }

  index_t first_, rows_;  // rows of the block
  key_range some_, all_;  // keys that some row, and that every row sees
  softmax_state<T, Vectors> softmax_[Maps];
  T c1_[lanes], c2_[lanes], scale_[lanes];
  T* queries_;  // [Maps][d][lanes]
  T* out_;      // [2][padded_channels][lanes]: of this span, of those before
};

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
