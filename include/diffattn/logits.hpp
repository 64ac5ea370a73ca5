// SPDX-License-Identifier: MIT
#pragma once

// What happens to a logit between the product q·k·scale and the softmax, beyond the intervals of mask.hpp. In this order:
//
//   soft cap      cap · tanh(logit / cap)
//   ALiBi         - slope · |own position - key|; query i of a call or packed sequence has position i + offset (mask.hpp),
//                 causal or not
//   bias          + any finite number; −∞ hides the key
//   visible, blocks, predicate: a key that one of them does not show is hidden
//   sink          one more logit in the sum of the softmax, without a value: a row without keys has its log-sum-exp
//
// Hidden is not "very small": a hidden key and its value are never read into a sum, so NaN or infinity there changes nothing.
// Every restriction intersects with every other, and with the mask. Whole tiles of hidden keys cost nothing.

#include "mask.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// An array [batch, heads, queries, keys] of the output heads, with any strides; 0 broadcasts.
template <class E>
struct logit_view {
  const E* data = nullptr;  ///< null: not given
  index_t batch_stride = 0, head_stride = 0, query_stride = 0, key_stride = 1;

  DIFFATTN_INLINE const E* at(index_t b, index_t h, index_t query, index_t key) const noexcept {
    return data + (b * batch_stride + h * head_stride + query * query_stride + key * key_stride);
  }
};

/// Which blocks of keys each block of queries sees (block-sparse attention): for query block r, the ascending block numbers
/// keys[begins[r]] … keys[begins[r + 1] - 1].
struct block_list {
  index_t query_block = 0, key_block = 0;  ///< tokens of a block
  const index_t* begins = nullptr;         ///< [batch, heads, query blocks + 1] with the strides below; null: not given
  const index_t* keys = nullptr;
  index_t batch_stride = 0, head_stride = 0;  ///< of begins; 0: the same for all

  DIFFATTN_INLINE const index_t* row(index_t b, index_t h, index_t query) const noexcept {
    return begins + (b * batch_stride + h * head_stride + query / query_block);
  }
};

/// How much of a tile is shown.
enum class sight { none, some, all };

/// A mask computed by the caller. The functions must always give the same answers, may run on any worker, and must not throw.
struct mask_predicate {
  const void* context = nullptr;  ///< handed to both
  /// Does query `query` of output head h see `key`? Asked only for keys of tiles of which `tile` said `some`. Null: no
  /// predicate.
  bool (*sees)(const void* context, index_t b, index_t h, index_t query, index_t key) = nullptr;
  /// What whole tiles show, of any size: queries first … last (included), keys begin … end - 1. `none` and `all` must be
  /// certain. Null: `some` of every tile.
  sight (*tile)(const void* context, index_t b, index_t h, index_t first, index_t last, key_range keys) = nullptr;
};

/// The rules of one map, or of both.
template <class R>
struct logit_rules {
  R soft_cap = R(0);                  ///< 0: none; else positive
  const R* slopes = nullptr;          ///< ALiBi: [output heads]
  logit_view<R> bias;                 ///< added, times nothing; finite or −∞. Beyond ±max/log2(e) it counts as ±max
  logit_view<unsigned char> visible;  ///< boolean: 0 hides the key. bool arrays may be passed as they are
  block_list blocks;
  mask_predicate predicate;
  const R* sinks = nullptr;  ///< [output heads] logits, bounded like a bias; −∞ is none

  /// Do logits change that are not hidden?
  DIFFATTN_INLINE bool changes() const noexcept { return soft_cap != R(0) || slopes || bias.data; }
  /// May keys be hidden?
  DIFFATTN_INLINE bool hides() const noexcept { return bias.data || visible.data || blocks.begins || predicate.sees; }
};

DIFFATTN_NAMESPACE_END
