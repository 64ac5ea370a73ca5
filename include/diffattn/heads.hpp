// SPDX-License-Identifier: MIT
#pragma once

// Which physical heads form a differential head. Published models pair queries, group keys and lay out values differently;
// a wrong guess runs and gives nonsense. A head_map answers one question: for differential head h, which query heads,
// key heads and value heads (of the tensors as they lie in memory) does it read?
//
//   family                            factory
//   microsoft/unilm V1 (flash files)  interleaved(heads, kv_pairs)
//   microsoft/unilm V1 (naive file)   interleaved_repeated(heads, kv_pairs)
//   microsoft/unilm V2                shared(heads, kv_heads)
//   Hugging Face DiffLlama            halves(heads, kv_heads)
//   Phi-4-mini-flash, Motif-2.6B      interleaved(heads, kv_pairs, value_layout::adjacent)
//   Motif-2-12.7B (grouped)           grouped(heads, ratio, kv_pairs)
//   Motif-3 (grouped, shared K/V)     grouped_shared(heads, ratio, kv_heads)
//   timm, DiffCLIP                    interleaved(heads, heads)
//   axolotl, split heads              component_major(heads, kv_pairs)
//   axolotl, doubled projections      component_major(heads, kv_pairs, value_layout::wide)
//   anything else                     table(pointer, heads)

#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// The physical heads that one differential head reads. value_2 = -1: the value is one head; otherwise the channels of
/// value_2 follow those of value_1 and the output is twice as wide as a value head.
struct head_indices {
  index_t query_1 = 0, query_2 = 0, key_1 = 0, key_2 = 0, value_1 = 0, value_2 = -1;
};

/// How the value of a differential head lies in memory.
enum class value_layout {
  wide,      ///< one head, already as wide as the output
  adjacent,  ///< two narrow heads 2j, 2j + 1
  distant    ///< two narrow heads j, j + (half of the value heads)
};

/// Differential head -> physical heads. A value type; copy it freely. A default-constructed map is refused by `check`.
struct head_map {
  /// Query heads of differential head h.
  enum class pairing {
    interleaved,  ///< 2h and 2h + 1
    halves,       ///< h and h + heads
    grouped,      ///< groups of `ratio` signal heads followed by their common noise head
    single,       ///< h alone: standard attention
    table
  };
  /// Key (and value) heads.
  enum class grouping {
    pairwise,  ///< pair j of the keys serves heads / kv consecutive differential heads; keys 2j and 2j + 1
    repeated,  ///< each physical query head j reads key head j / (query heads / key heads)
    split,     ///< pair j is keys j and j + kv
    shared     ///< both maps read key head j and value head j
  };

  index_t heads = 0;  ///< differential heads = heads of the output
  index_t kv = 0;     ///< key/value pairs, or key/value heads for `repeated` halves and for `shared`
  index_t ratio = 1;  ///< signal heads to a noise head
  pairing queries = pairing::interleaved;
  grouping keys = grouping::pairwise;
  value_layout values = value_layout::wide;
  const head_indices* entries = nullptr;  ///< for `table`: `heads` rows, owned by the caller

  /// Pairs 2h, 2h + 1 for queries and keys; pair j of keys serves heads / kv_pairs consecutive heads
  /// (multihead_flashdiff_1.py).
  static DIFFATTN_INLINE head_map interleaved(index_t heads, index_t kv_pairs, value_layout v = value_layout::wide) noexcept {
    return {heads, kv_pairs, 1, pairing::interleaved, grouping::pairwise, v, nullptr};
  }
  /// As `interleaved`, but key heads are repeated per physical query head (multihead_diffattn.py with grouped keys): with an
  /// even ratio both maps of a pair read the same key head. The two agree when heads == kv_pairs.
  static DIFFATTN_INLINE head_map interleaved_repeated(index_t heads, index_t kv_pairs) noexcept {
    return {heads, kv_pairs, 1, pairing::interleaved, grouping::repeated, value_layout::wide, nullptr};
  }
  /// Query heads h and h + heads; key/value heads repeated first and halved then; the value is heads h/g and (h + heads)/g side
  /// by side, g = 2 heads / kv_heads (modeling_diffllama.py, DiffLlamaAttention).
  static DIFFATTN_INLINE head_map halves(index_t heads, index_t kv_heads) noexcept {
    return {heads, kv_heads, 1, pairing::halves, grouping::repeated, value_layout::distant, nullptr};
  }
  /// Groups [s_0 … s_(ratio-1), n]: each signal head minus λ times its group's noise head; keys and values in adjacent pairs
  /// (arXiv 2510.06949; grouped_diff_attn.py).
  static DIFFATTN_INLINE head_map grouped(index_t heads, index_t signal_per_noise, index_t kv_pairs,
                                          value_layout v = value_layout::adjacent) noexcept {
    return {heads, kv_pairs, signal_per_noise, pairing::grouped, grouping::pairwise, v, nullptr};
  }
  /// As `grouped`, signal and noise heads of a group reading the same key and value head (Motif-3).
  static DIFFATTN_INLINE head_map grouped_shared(index_t heads, index_t signal_per_noise, index_t kv_heads) noexcept {
    return {heads, kv_heads, signal_per_noise, pairing::grouped, grouping::shared, value_layout::wide, nullptr};
  }
  /// Version 2: query heads 2h, 2h + 1 share one key and one value head (multihead_flashdiffv2.py).
  static DIFFATTN_INLINE head_map shared(index_t heads, index_t kv_heads) noexcept {
    return {heads, kv_heads, 1, pairing::interleaved, grouping::shared, value_layout::wide, nullptr};
  }
  /// All first queries, then all second ones, and so for keys and (by default) the halves of the values.
  static DIFFATTN_INLINE head_map component_major(index_t heads, index_t kv_pairs,
                                                  value_layout v = value_layout::distant) noexcept {
    return {heads, kv_pairs, 1, pairing::halves, grouping::split, v, nullptr};
  }
  /// Standard grouped-query attention: query head h reads key and value head h / (heads / kv_heads).
  static DIFFATTN_INLINE head_map single(index_t heads, index_t kv_heads) noexcept {
    return {heads, kv_heads, 1, pairing::single, grouping::shared, value_layout::wide, nullptr};
  }
  /// Any other assignment, row h for differential head h. `entries` must outlive the call.
  static DIFFATTN_INLINE head_map table(const head_indices* entries, index_t heads) noexcept {
    return {heads, heads, 1, pairing::table, grouping::pairwise, value_layout::wide, entries};
  }

  /// The physical heads of differential head h. Needs a map that `check` accepts.
  DIFFATTN_INLINE head_indices operator[](index_t h) const noexcept {
    if (queries == pairing::table) return entries[h];
    head_indices i;
    switch (queries) {
      case pairing::interleaved: i.query_1 = 2 * h, i.query_2 = 2 * h + 1; break;
      case pairing::halves: i.query_1 = h, i.query_2 = h + heads; break;
      case pairing::grouped:
        i.query_1 = h + h / ratio;
        i.query_2 = h / ratio * (ratio + 1) + ratio;
        break;
      default: i.query_1 = i.query_2 = h; break;
    }
    const index_t per_kv = heads / kv;  // differential heads to a key/value pair (or shared head)
    const index_t j = per_kv > 0 ? h / per_kv : 0;
    switch (keys) {
      case grouping::pairwise: i.key_1 = 2 * j, i.key_2 = 2 * j + 1; break;
      case grouping::split: i.key_1 = j, i.key_2 = j + kv; break;
      case grouping::shared: i.key_1 = i.key_2 = j; break;
      case grouping::repeated:
        if (queries == pairing::halves) {
          const index_t repeat = 2 * heads / kv;
          i.key_1 = i.query_1 / repeat, i.key_2 = i.query_2 / repeat;
          i.value_1 = i.key_1, i.value_2 = i.key_2;
          return i;
        }
        i.key_1 = i.query_1 / per_kv, i.key_2 = i.query_2 / per_kv;
        break;
    }
    switch (values) {
      case value_layout::wide: i.value_1 = j, i.value_2 = -1; break;
      case value_layout::adjacent: i.value_1 = 2 * j, i.value_2 = 2 * j + 1; break;
      case value_layout::distant: i.value_1 = j, i.value_2 = j + kv; break;
    }
    return i;
  }
};

DIFFATTN_NAMESPACE_END
