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
// about one cycle for each pair of query and key, a second product would cost d/8 or more.

#include "group.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// One worker's scratch memory.
template <class T>
struct block_scratch {
  T* queries;   ///< [group][maps][d][lane]
  T* weights;   ///< [maps][group][key][lane]
  T* combined;  ///< [chunk key][lane], of one group at a time
  T* out;       ///< [group][2][padded_channels][lane]
  bool* live;   ///< [maps][group][softmax block] does the map show some of its keys? Only for rules that hide
};

template <int Maps, int Vectors, class T>
DIFFATTN_NOINLINE void attend_block(const block_job<T>& job, const block_scratch<T>& scratch) noexcept {
  using group_t = group<Maps, Vectors, T>;
  constexpr index_t lanes = group_t::lanes;
  const index_t count = (job.rows + lanes - 1) / lanes;
  const index_t lo = job.visible[0].begin / chunk_keys * chunk_keys, hi = job.visible[job.rows - 1].end;
  const index_t span = Maps == 1 ? chunk_keys : hi - lo;  // keys whose weights are kept

  group_t groups[(max_block_rows + lanes - 1) / lanes];
  for (index_t i = 0; i < count; ++i)
    groups[i].start(job, i * lanes, scratch.queries + i * Maps * job.d * lanes,
                    scratch.out + 2 * i * padded_channels(job.dv) * lanes);

  const auto end_of_chunk = [hi](index_t begin) { return begin + chunk_keys < hi ? begin + chunk_keys : hi; };
  const auto weights_of = [&](int map, index_t i, index_t key) {
    return scratch.weights + ((map * count + i) * span + (Maps == 1 ? key % chunk_keys : key - lo)) * lanes;
  };
  // Blocks that the rules of a map hide have weight 0, and are left out where no map shows them.
  const bool sparse = group_t::hides(job, 0) || group_t::hides(job, Maps - 1);
  const auto is_live = [&](int map, index_t i, index_t key) -> bool& {
    const index_t blocks = span / softmax_keys + 1;
    return scratch.live[(map * count + i) * blocks + (Maps == 1 ? key % chunk_keys : key - lo) / softmax_keys];
  };
  // Weights of one map for keys [begin, end): all groups take a softmax block of keys before the next one is read.
  const auto weigh = [&](int map, index_t begin, index_t end) {
    for (index_t from = begin; from < end; from += softmax_keys)
      for (index_t i = 0; i < count; ++i) {
        const key_range keys = groups[i].seen(from, from + softmax_keys < end ? from + softmax_keys : end);
        const index_t first_kept = groups[i].seen(begin, end).begin;
        if (keys.begin >= keys.end) continue;
        T* const weights = weights_of(map, i, keys.begin);
        const sight shown = groups[i].sees(job, map, keys);
        if (sparse) is_live(map, i, from) = shown != sight::none;
        if (shown != sight::none)
          groups[i].weigh(job, map, keys, shown, weights, keys.begin - first_kept, Maps == 1);
        else
          for (index_t e = 0; e < (keys.end - keys.begin) * lanes; e += simd::lanes<T>)
            simd::store(weights + e, simd::broadcast(T(0)));
      }
  };
  // From the first to the last key of a chunk that group i sees in maps `first` … `last`. What is hidden in between has weight
  // 0: the sum of a row must not depend on what its neighbours see.
  const auto shown = [&](index_t i, key_range keys, int first, int last) {
    const auto dead = [&](index_t key) { return !is_live(first, i, key) && !is_live(last, i, key); };
    while (sparse && keys.begin < keys.end && dead(keys.begin)) keys.begin = (keys.begin / softmax_keys + 1) * softmax_keys;
    while (sparse && keys.begin < keys.end && dead(keys.end - 1)) keys.end = (keys.end - 1) / softmax_keys * softmax_keys;
    return keys;
  };
  // Output += weights · V for one chunk; `weights(i, keys)` gives group i's weights of keys.begin and on.
  const auto add_values = [&](index_t begin, int first, int last, auto&& weights) {
    const bool more = Maps > 1 && span > cached_keys && begin + chunk_keys < hi;
    for (index_t i = 0; i < count; ++i) {
      const key_range keys = shown(i, groups[i].seen(begin, end_of_chunk(begin)), first, last);
      const T* const ahead_1 = more ? weights_of(0, i, begin + chunk_keys) : nullptr;
      const T* const ahead_2 = more ? weights_of(Maps - 1, i, begin + chunk_keys) : nullptr;
      if (keys.begin < keys.end) groups[i].add_values(job, weights(i, keys), keys, first, last, ahead_1, ahead_2);
      if (begin / chunk_keys % span_chunks == span_chunks - 1) groups[i].close_span(job);
    }
  };

  if constexpr (Maps == 1) {
    for (index_t begin = lo; begin < hi; begin += chunk_keys) {
      weigh(0, begin, end_of_chunk(begin));
      add_values(begin, 0, 0, [&](index_t i, key_range keys) { return weights_of(0, i, keys.begin); });
    }
    for (index_t i = 0; i < count; ++i) groups[i].add_sinks(job, 0), groups[i].take_map(0);
  } else {
    for (int map = 0; map < Maps; ++map) {
      weigh(map, lo, hi);
      for (index_t i = 0; i < count; ++i) groups[i].add_sinks(job, map);
    }
    for (int map = 0; map < Maps; ++map) {
      if (!job.raw[map]) continue;
      for (index_t begin = lo; begin < hi; begin += chunk_keys)
        add_values(begin, map, map, [&](index_t i, key_range keys) { return weights_of(map, i, keys.begin); });
      for (index_t i = 0; i < count; ++i) {
        groups[i].take_map(map);
        groups[i].finish(job, head_norm<T>::none(), job.raw[map], job.raw_stride[map]);
        groups[i].clear(job);
      }
    }
    for (index_t i = 0; i < count; ++i) groups[i].mix_maps(job);
    for (index_t begin = lo; begin < hi; begin += chunk_keys)
      add_values(begin, 0, Maps - 1, [&](index_t i, key_range keys) {
        return groups[i].combine_maps(weights_of(0, i, keys.begin), weights_of(1, i, keys.begin), keys, scratch.combined);
      });
  }
  for (index_t i = 0; i < count; ++i) {
    groups[i].finish(job, job.norm, job.out, job.out_stride);
    for (int map = 0; map < Maps; ++map)
      if (job.lse[map]) groups[i].store_log_sum_exp(map, job.lse[map], job.lse_stride[map]);
  }
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
