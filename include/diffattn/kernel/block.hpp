// SPDX-License-Identifier: MIT
#pragma once

// The algorithm: one block of query rows of one (differential) head, from queries to finished output.
//
//   differential                                     standard
//     for both maps: weights of all visible keys       for each chunk of keys:
//     for each chunk of keys:                              weights of the chunk
//       combine the two maps' weights                      out += weights · V
//       out += combined · V
//
// The product with V, half of all arithmetic, is done once, for the difference of the maps. That needs both sums before the
// first product, so the weights of all keys are kept: 2 maps × 128 bytes a key for 32 queries. What leaves the cache costs
// about one cycle for each pair of query and key, a second product would cost d/2.

#include <cmath>

#include "../mask.hpp"
#include "../simd/transpose.hpp"
#include "epilogue.hpp"
#include "scores.hpp"
#include "values.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// One block's work. Pointers are to the first row; strides are between tokens.
template <class T>
struct block_job {
  const T* q[2];
  const T* k[2];  ///< key 0
  index_t q_stride, k_stride;
  index_t rows, d, dv;
  T scale;                   ///< of the scores in log2 units: scale · log2 e
  const key_range* visible;  ///< [rows], both ends non-decreasing
  const T* packed;           ///< packed chunk `first_chunk`
  const bool* finite;        ///< of each packed chunk: no infinite or NaN value
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

/// One worker's scratch memory.
template <class T>
struct block_scratch {
  T* queries;   ///< [maps][group][d][lane]
  T* weights;   ///< [maps][group][key][lane]
  T* combined;  ///< [chunk key][lane], of one group at a time
  T* out;       ///< [group][dv rounded up to a panel pair][lane]
};

/// Channels of the output accumulators: whole pairs of panels, for the tiles of one vector.
constexpr index_t padded_channels(index_t dv) noexcept {
  return round_up(dv, 2 * panel_channels);
}

/// Keys for which a differential block keeps weights, at most: [lo, hi) from the chunk that holds lo.
constexpr index_t weight_span(index_t lo, index_t hi) noexcept {
  return hi - lo / chunk_keys * chunk_keys;
}

/// One group's view of a block.
template <int Maps, int Vectors, class T>
struct group_state {
  static constexpr index_t lanes = group_lanes<T, Vectors>;
  index_t first, rows;     ///< rows of the block
  index_t lo, hi;          ///< keys that some row sees
  index_t all_lo, all_hi;  ///< keys that every row sees
  softmax_state<T, Vectors> softmax[Maps];
  T c1[lanes], c2[lanes], s[lanes];
  const T* q[Maps];
  T* weights[Maps];
  T* out;

  /// What each lane sees of the keys from `key` on; lanes without a row do as the last row does.
  DIFFATTN_INLINE visible_lanes<T, Vectors> visible_from(const block_job<T>& job, index_t key, index_t count) const noexcept {
    visible_lanes<T, Vectors> lanes_seen;
    for (index_t i = 0; i < lanes; ++i) {
      const key_range r = job.visible[first + (i < rows ? i : rows - 1)];
      const index_t begin = r.begin - key, end = r.end - key;
      lanes_seen.begin[i] = static_cast<T>(begin < 0 ? 0 : begin < count ? begin : count);
      lanes_seen.end[i] = static_cast<T>(end < 0 ? 0 : end < count ? end : count);
    }
    return lanes_seen;
  }
  /// s = 1 / Σ weights of one map.
  DIFFATTN_INLINE void divide_by_sum(int map) noexcept {
    for (int v = 0; v < Vectors; ++v)
      simd::store(s + v * simd::lanes<T>, inverse_or_zero<T>(simd::load(softmax[map].sum + v * simd::lanes<T>)));
  }
  /// c1, c2 and s of both maps.
  DIFFATTN_INLINE void mix_maps(const block_job<T>& job) noexcept {
    T alpha[lanes], lambda[lanes];
    for (index_t i = 0; i < lanes; ++i) {
      const index_t row = first + (i < rows ? i : rows - 1);
      alpha[i] = job.alpha[row], lambda[i] = job.lambda[row];
    }
    for (index_t i = 0; i < lanes; i += simd::lanes<T>) {
      vec<T> a, b, scale;
      mix<T>(simd::load(alpha + i), simd::load(lambda + i), simd::load(softmax[0].sum + i),
             simd::load(softmax[Maps - 1].sum + i), a, b, scale);
      simd::store(c1 + i, a), simd::store(c2 + i, b), simd::store(s + i, scale);
    }
  }
  DIFFATTN_INLINE bool all_see(index_t begin, index_t end) const noexcept { return all_lo <= begin && end <= all_hi; }
};

/// Weights of one map for keys [begin, end), which lie in one softmax block. `x` is where key `begin` goes; `kept` rows of
/// weights before it and `channels` of the output follow a raised shift.
template <int Maps, int Vectors, class T>
DIFFATTN_INLINE void weigh(const block_job<T>& job, group_state<Maps, Vectors, T>& g, int map, index_t begin, index_t end, T* x,
                           index_t kept, index_t channels) noexcept {
  constexpr int keys = tile_keys<Vectors>;
  constexpr index_t lanes = group_lanes<T, Vectors>;
  softmax_state<T, Vectors>& state = g.softmax[map];
  for (index_t i = 0; i < lanes; ++i) state.top[i] = -std::numeric_limits<T>::infinity();
  const T* const k = job.k[map];
  index_t key = begin;
  for (; key + keys <= end; key += keys)
    score_tile<Vectors, keys>(g.q[map], k + key * job.k_stride, job.k_stride, keys, job.d, k + (key + keys) * job.k_stride,
                              state, x + (key - begin) * lanes);
  if (key < end)
    score_tile<Vectors, keys>(g.q[map], k + key * job.k_stride, job.k_stride, end - key, job.d, k + key * job.k_stride, state,
                              x + (key - begin) * lanes);
  if (!g.all_see(begin, end)) hide_keys<Vectors>(g.visible_from(job, begin, end - begin), 0, end - begin, x, state);
  bool rises = false;
  for (int v = 0; v < Vectors; ++v)
    rises |= simd::any<T>(simd::load(state.top + v * simd::lanes<T>) > simd::load(state.limit + v * simd::lanes<T>));
  if (rises) raise_shift<Vectors>(state, x, end - begin, x - kept * lanes, kept, g.out, channels);
  exponentials<Vectors>(x, end - begin, state);
}

/// out += weights · V for keys [begin, end) of one chunk; weights[0] belongs to `begin`.
template <int Maps, int Vectors, class T>
DIFFATTN_INLINE void add_values(const block_job<T>& job, group_state<Maps, Vectors, T>& g, const T* weights, index_t begin,
                                index_t end) noexcept {
  constexpr int tile_panels = 2 / Vectors;
  constexpr index_t lanes = group_lanes<T, Vectors>;
  const index_t chunk = begin / chunk_keys, panels = (job.dv + panel_channels - 1) / panel_channels;
  const T* const values =
      job.packed + (chunk - job.first_chunk) * packed_chunk_size<T>(job.dv) + (begin - chunk * chunk_keys) * panel_channels;
  const bool hides = !job.finite[chunk - job.first_chunk] && !g.all_see(begin, end);
  visible_lanes<T, Vectors> visible;
  if (hides) visible = g.visible_from(job, begin, end - begin);
  index_t panel = 0;
  for (; !hides && panel + tile_panels <= panels; panel += tile_panels)
    value_tile<Vectors, tile_panels, false>(weights, values + panel * panel_step<T>, end - begin, visible,
                                            g.out + panel * panel_channels * lanes);
  for (; panel < panels; ++panel)
    value_tile<Vectors, 1, true>(weights, values + panel * panel_step<T>, end - begin, visible,
                                 g.out + panel * panel_channels * lanes);
}

template <int Maps, int Vectors, class T>
DIFFATTN_NOINLINE void attend_block(const block_job<T>& job, const block_scratch<T>& scratch) noexcept {
  constexpr index_t lanes = group_lanes<T, Vectors>;
  constexpr index_t max_groups = max_block_rows / lanes > 0 ? max_block_rows / lanes : 1;
  const index_t groups = (job.rows + lanes - 1) / lanes, out_size = padded_channels(job.dv) * lanes;
  const index_t lo = job.visible[0].begin, hi = job.visible[job.rows - 1].end;
  const index_t base = lo / chunk_keys * chunk_keys, span = Maps == 1 ? chunk_keys : weight_span(lo, hi);
  group_state<Maps, Vectors, T> group[max_groups];

  for (index_t i = 0; i < groups; ++i) {
    auto& g = group[i];
    g.first = i * lanes;
    g.rows = job.rows - g.first < lanes ? job.rows - g.first : lanes;
    const key_range &top = job.visible[g.first], &bottom = job.visible[g.first + g.rows - 1];
    g.lo = top.begin, g.hi = bottom.end, g.all_lo = bottom.begin, g.all_hi = top.end;
    g.out = scratch.out + i * out_size;
    for (index_t e = 0; e < out_size; ++e) g.out[e] = T(0);
    for (int map = 0; map < Maps; ++map) {
      T* const q = scratch.queries + (map * groups + i) * job.d * lanes;
      if (g.rows < lanes)
        for (index_t e = 0; e < job.d * lanes; ++e) q[e] = T(0);
      simd::transpose<simd::transpose_order::gather>(job.q[map] + g.first * job.q_stride, job.q_stride, g.rows, job.d, q, lanes,
                                                     job.scale);
      g.q[map] = q;
      g.weights[map] = scratch.weights + (map * groups + i) * span * lanes;
      g.softmax[map].reset();
    }
  }
  const auto later = [](index_t a, index_t b) { return a > b ? a : b; };
  const auto sooner = [](index_t a, index_t b) { return a < b ? a : b; };

  // Weights of one map for the visible part of keys [begin, end), softmax block by softmax block.
  const auto weigh_keys = [&](int map, index_t begin, index_t end) {
    for (index_t from = begin / softmax_keys * softmax_keys; from < end; from += softmax_keys)
      for (index_t i = 0; i < groups; ++i) {
        auto& g = group[i];
        const index_t b = later(later(from, begin), g.lo), e = sooner(sooner(from + softmax_keys, end), g.hi);
        if (b >= e) continue;
        const index_t start = Maps == 1 ? later(begin, g.lo) : g.lo;  // first key of the kept weights
        weigh(job, g, map, b, e, g.weights[map] + (b - (Maps == 1 ? begin : base)) * lanes, b - start,
              Maps == 1 ? padded_channels(job.dv) : 0);
      }
  };
  // out += weights · V for keys [begin, end) of one chunk, `prepare(group, begin, end)` giving the weights of key `begin` on.
  const auto add_chunk = [&](index_t begin, index_t end, auto&& prepare) {
    for (index_t i = 0; i < groups; ++i) {
      const index_t b = later(begin, group[i].lo), e = sooner(end, group[i].hi);
      if (b < e) add_values(job, group[i], prepare(group[i], b, e), b, e);
    }
  };
  const auto store = [&](const group_state<Maps, Vectors, T>& g, T* to, index_t stride) {
    simd::transpose<simd::transpose_order::scatter>(g.out, lanes, job.dv, g.rows, to + g.first * stride, stride, T(1));
  };

  if constexpr (Maps == 1) {
    for (index_t begin = base; begin < hi; begin += chunk_keys) {
      const index_t end = sooner(begin + chunk_keys, hi);
      weigh_keys(0, begin, end);
      add_chunk(begin, end, [&](auto& g, index_t b, index_t) { return g.weights[0] + (b - begin) * lanes; });
    }
  } else {
    for (int map = 0; map < Maps; ++map) weigh_keys(map, base, hi);
    for (int map = 0; map < Maps; ++map) {
      if (!job.raw[map]) continue;
      for (index_t begin = base; begin < hi; begin += chunk_keys)
        add_chunk(begin, sooner(begin + chunk_keys, hi),
                  [&](auto& g, index_t b, index_t) { return g.weights[map] + (b - base) * lanes; });
      for (index_t i = 0; i < groups; ++i) {
        auto& g = group[i];
        g.divide_by_sum(map);
        normalise<Vectors>(g.out, job.dv, g.s, head_norm<T>::none());
        store(g, job.raw[map], job.raw_stride[map]);
        for (index_t e = 0; e < out_size; ++e) g.out[e] = T(0);
      }
    }
    for (index_t i = 0; i < groups; ++i) group[i].mix_maps(job);
    for (index_t begin = base; begin < hi; begin += chunk_keys)
      add_chunk(begin, sooner(begin + chunk_keys, hi), [&](auto& g, index_t b, index_t e) -> const T* {
        combine<Vectors>(g.weights[0] + (b - base) * lanes, g.weights[1] + (b - base) * lanes, g.c1, g.c2, e - b,
                         scratch.combined);
        return scratch.combined;
      });
  }
  for (index_t i = 0; i < groups; ++i) {
    auto& g = group[i];
    if constexpr (Maps == 1) g.divide_by_sum(0);
    normalise<Vectors>(g.out, job.dv, g.s, job.norm);
    store(g, job.out, job.out_stride);
    for (int map = 0; map < Maps; ++map)
      if (job.lse[map])
        for (index_t r = 0; r < g.rows; ++r)
          job.lse[map][(g.first + r) * job.lse_stride[map]] =
              (g.softmax[map].shift[r] + std::log2(g.softmax[map].sum[r])) * T(0.693147180559945309417);
  }
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
