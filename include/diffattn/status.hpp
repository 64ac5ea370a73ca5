// SPDX-License-Identifier: MIT
#pragma once

// What can be wrong with a call. Every status names the argument at fault; after any but `ok` nothing has been written.

#include "config.hpp"

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
#define DIFFATTN_EXCEPTIONS 1
#include <stdexcept>
#else
#define DIFFATTN_EXCEPTIONS 0
#include <cstdlib>
#endif

DIFFATTN_NAMESPACE_BEGIN

enum class status {
  ok,
  q_null,
  k_null,
  v_null,
  out_null,
  q_size,
  k_size,
  v_size,
  out_size,
  q_width_stride,
  k_width_stride,
  v_width_stride,
  out_width_stride,
  k_batch,
  v_batch,
  out_batch,
  v_tokens,
  out_tokens,
  k_width,
  out_width,
  heads_missing,
  heads_table_null,
  heads_kv_groups,
  heads_pair_across_kv_groups,
  q_heads,
  k_heads,
  v_heads,
  out_heads,
  heads_value_layout,
  lambda_missing,
  lambda_shape,
  alpha_missing,
  alpha_shape,
  scale_not_finite,
  norm_eps,
  norm_gain,
  norm_bias,
  mask_offset,
  mask_window,
  mask_window_not_causal,
  mask_key_range,
  mask_prefix_not_causal,
  mask_prefix,
  mask_packed,
  mask_packed_batch,
  mask_packed_cache,
  mask_packed_key_ranges,
  logits_soft_cap,
  logits_strides,
  logits_blocks,
  logits_predicate,
  out_strides,
  out_overlaps_q,
  out_overlaps_k,
  out_overlaps_v,
  out_overlaps_parameter,
  lse_strides,
  lse_overlap,
  raw_out_shape,
  raw_out_strides,
  raw_out_overlap,
  executor_workers,
  workspace_overflow,
  workspace_null,
  workspace_too_small,
  workspace_overlap,
  rope_table,
  rope_width,
  rope_position,
  cache_config,
  cache_storage,
  cache_memory,
  cache_not_open,
  cache_sequence,
  cache_key_shape,
  cache_value_shape,
  cache_full,
  cache_no_page,
  cache_overlap,
  cache_length,
  cache_fork,
  cache_heads,
  cache_missing,
  cache_shape,
  cache_range,
  cache_page,
  cache_and_tensors,
  out_overlaps_cache,
  schedule_unknown,
  merge_parts,
  merge_part_shape,
  layer_width,
  layer_option,
  layer_one_map,
  layer_weight_missing,
  layer_weight_unexpected,
  layer_x,
  layer_out,
  layer_rope,
  layer_keys
};

/// One sentence that names the argument.
DIFFATTN_INLINE const char* message(status s) noexcept {
  switch (s) {
    case status::ok: return "ok";
    case status::q_null: return "q: data is null";
    case status::k_null: return "k: data is null";
    case status::v_null: return "v: data is null";
    case status::out_null: return "out: data is null";
    case status::q_size: return "q: a size is negative, or width is 0, or the extent overflows";
    case status::k_size: return "k: a size is negative, or width is 0, or the extent overflows";
    case status::v_size: return "v: a size is negative, or width is 0, or the extent overflows";
    case status::out_size: return "out: a size is negative, or width is 0, or the extent overflows";
    case status::q_width_stride: return "q: the channels of a head must be contiguous (width_stride 1)";
    case status::k_width_stride: return "k: the channels of a head must be contiguous (width_stride 1)";
    case status::v_width_stride: return "v: the channels of a head must be contiguous (width_stride 1)";
    case status::out_width_stride: return "out: the channels of a head must be contiguous (width_stride 1)";
    case status::k_batch: return "k: batch differs from that of q";
    case status::v_batch: return "v: batch differs from that of q";
    case status::out_batch: return "out: batch differs from that of q";
    case status::v_tokens: return "v: tokens differ from those of k";
    case status::out_tokens: return "out: tokens differ from those of q";
    case status::k_width: return "k: width differs from that of q";
    case status::out_width: return "out: width differs from that of the value (twice v's width for two narrow value heads)";
    case status::heads_missing: return "heads: no head map given, or a count is not within [1, 2^24]";
    case status::heads_table_null: return "heads: the table is null";
    case status::heads_kv_groups:
      return "heads: the number of heads is no multiple of the key/value heads or of the signal heads to a noise head";
    case status::heads_pair_across_kv_groups: return "heads: a pair would read two different key/value groups";
    case status::q_heads: return "q: number of heads does not fit the head map";
    case status::k_heads: return "k: number of heads does not fit the head map";
    case status::v_heads: return "v: number of heads does not fit the head map";
    case status::out_heads: return "out: number of heads does not fit the head map";
    case status::heads_value_layout: return "heads: some heads read one value head and others two";
    case status::lambda_missing: return "lambda: not given, or its array is null";
    case status::lambda_shape: return "lambda: its array is for other tokens or heads than out, or its strides overflow";
    case status::alpha_missing: return "alpha: not given, or its array is null";
    case status::alpha_shape: return "alpha: its array is for other tokens or heads than out, or its strides overflow";
    case status::scale_not_finite: return "scale: not a finite number, or above the largest one over log2(e)";
    case status::norm_eps: return "norm.eps: negative or not a finite number";
    case status::norm_gain: return "norm.gain: not a finite number";
    case status::norm_bias: return "norm.bias: only norm_kind::group has a bias";
    case status::mask_offset: return "mask.offset: beyond 2^62";
    case status::mask_window: return "mask.window: must be positive, or unlimited";
    case status::mask_window_not_causal: return "mask.window: needs mask.causal";
    case status::mask_key_range: return "mask.key_ranges: a range is not within [0, kv_len] or ends before it begins";
    case status::mask_prefix_not_causal: return "mask.prefixes: need mask.causal";
    case status::mask_prefix: return "mask.prefixes: a number is not within [0, kv_len]";
    case status::mask_packed:
      return "mask.query_starts, key_starts: null, no sequences, descending, or not from 0 to q_len and within kv_len";
    case status::mask_packed_batch: return "mask.query_starts: packed sequences make one batch entry";
    case status::mask_packed_cache: return "mask.query_starts: packed sequences need k and v, not a cache";
    case status::mask_packed_key_ranges: return "mask.key_ranges: not with packed sequences, which need no padding";
    case status::logits_soft_cap:
      return "logits.soft_cap: negative, not a finite number, or above the largest one over log2(e)";
    case status::logits_strides: return "logits: the strides of bias, visible or blocks overflow";
    case status::logits_blocks:
      return "logits.blocks: a size is not positive, keys is null, begins descend, or key blocks are not ascending within "
             "kv_len";
    case status::logits_predicate: return "logits.predicate: tile or context without sees";
    case status::out_strides: return "out: two elements share an address";
    case status::out_overlaps_q: return "out: overlaps q";
    case status::out_overlaps_k: return "out: overlaps k";
    case status::out_overlaps_v: return "out: overlaps v";
    case status::out_overlaps_parameter:
      return "out: overlaps lambda, alpha, norm.weight, norm.bias, an array of mask or logits, the head table, sequences or an "
             "array of the cache";
    case status::lse_strides: return "lse: two elements share an address";
    case status::lse_overlap: return "lse: overlaps another argument";
    case status::raw_out_shape: return "out1/out2: shape or width stride differs from that of out";
    case status::raw_out_strides: return "out1/out2: two elements share an address";
    case status::raw_out_overlap: return "out1/out2: overlaps another argument";
    case status::executor_workers: return "executor: fewer than one worker";
    case status::workspace_overflow: return "workspace: the size needed overflows";
    case status::workspace_null: return "workspace: data is null";
    case status::workspace_too_small: return "workspace: smaller than workspace_bytes";
    case status::workspace_overlap: return "workspace: overlaps another argument";
    case status::rope_table:
      return "rope: the table is null, a size negative or odd, or a parameter of its config out of range";
    case status::rope_width: return "rope: rotates more channels than a head has";
    case status::rope_position: return "rope: a position lies outside the table";
    case status::cache_config:
      return "cache: the head map, a width, the number of sequences, the capacity or the page size is missing or too large";
    case status::cache_storage:
      return "cache: this storage type cannot be used here (f64 needs a call in double, and only that)";
    case status::cache_memory: return "cache: memory is null or smaller than kv_cache_bytes";
    case status::cache_not_open: return "cache: used before open";
    case status::cache_sequence:
      return "cache: no such sequence, one sequence twice, or batch differs from the number of sequences";
    case status::cache_key_shape: return "append: k does not have the heads and width of the cache";
    case status::cache_value_shape: return "append: v does not have the heads, width and tokens that belong to k and the cache";
    case status::cache_full: return "append: past the capacity";
    case status::cache_no_page: return "append: the pool has no free page left";
    case status::cache_overlap: return "append: k or v lies in the memory of the cache";
    case status::cache_length: return "cache: the length is not within what the sequence holds";
    case status::cache_fork: return "fork: only paged caches share pages";
    case status::cache_heads: return "cache: made for another head map than that of the call";
    case status::cache_missing: return "cache: missing, although sequences of one are named";
    case status::cache_shape: return "cache: a size or stride of the view is negative, zero or too large, or a pointer is null";
    case status::cache_range:
      return "cache: a query may see keys that the cache does not hold (not written yet, overwritten in a ring, or discarded)";
    case status::cache_page: return "cache: the table names a page outside the pool, or a free page";
    case status::cache_and_tensors: return "k, v: must be left empty when a cache is given";
    case status::out_overlaps_cache: return "out: overlaps the cache";
    case status::schedule_unknown: return "schedule: not a schedule";
    case status::merge_parts: return "merge: no parts, or the array of parts is null";
    case status::merge_part_shape: return "merge: a part has other sizes than out, or a null or overlapping pointer";
    case status::layer_width: return "layer: a width of its config is missing or too large";
    case status::layer_option: return "layer: an option of its config is unknown";
    case status::layer_one_map:
      return "layer: the lambda rule none needs a head map without pairs, no gate on map 1 and no norm, and others need pairs";
    case status::layer_weight_missing: return "layer: a weight that its config asks for is null";
    case status::layer_weight_unexpected: return "layer: a weight is given that its config does not have";
    case status::layer_x: return "layer: x is null, or not [batch, tokens, 1, model_width] with all tokens at one distance";
    case status::layer_out: return "layer: out is null, of another shape than x, or overlaps x, a weight or the cache";
    case status::layer_rope: return "layer: the rotary table is missing, not wanted, or of another style than its config";
    case status::layer_keys:
      return "layer: keys_and_values belong to a config that borrows keys, and a cache to one that does not";
  }
  return "unknown status";
}

/// Throws std::invalid_argument with the message unless ok. Without exceptions it ends the program: callers that cannot throw
/// use the calls that return a status.
DIFFATTN_INLINE void throw_if_error(status s) {
  if (s == status::ok) return;
#if DIFFATTN_EXCEPTIONS
  throw std::invalid_argument(message(s));
#else
  std::abort();
#endif
}

DIFFATTN_NAMESPACE_END
