// SPDX-License-Identifier: MIT
#pragma once

// Which keys a query row may see, as far as one interval of keys says it; logits.hpp has the other masks. Both ends of the
// interval never move down from one row to the next; kernels ask `visible_keys` and nothing else.
//
// Causal, drawn for 3 queries (rows) on 5 keys; the default aligns the last query with the last key, as a cache needs:
//
//   offset = kv_len - q_len = 2        offset = 0             offset = 0, prefix = 3      packed, 1 + 2 queries on 2 + 3 keys
//     x x x . .                          x . . . .              x x x . .                   x x . . .
//     x x x x .                          x x . . .              x x x . .                   . . x x .
//     x x x x x                          x x x . .              x x x . .                   . . x x x

#include <cstdint>
#include <limits>

#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// Keys begin … end - 1.
struct key_range {
  index_t begin = 0, end = 0;
};

struct attention_mask {
  static constexpr index_t align_to_end = std::numeric_limits<index_t>::min();
  static constexpr index_t unlimited = -1;

  /// Query i sees key j only if j <= i + offset.
  bool causal = false;
  /// The position of query 0 among the keys; kv_len - q_len unless given. Without `causal` only ALiBi (logits.hpp) asks for it.
  index_t offset = align_to_end;
  /// Query i sees its own key i + offset and the window - 1 keys before it. Needs `causal`.
  index_t window = unlimited;
  /// Padding: [batch] ranges of keys that hold data, within [0, kv_len); null = all. Keys outside are never read. Positions
  /// stay those among all keys: with padding on the right the last query is not the last key of its range.
  const key_range* key_ranges = nullptr;
  /// Prefix-LM: [batch] (packed: [sequences]) numbers of first keys that every query of the entry (sequence) sees, whatever
  /// `causal` says, counted from key 0, padding too; null = 0. Needs `causal`. A window still hides what lies before it.
  const index_t* prefixes = nullptr;

  /// Sequences packed one after the other in one batch entry, which do not see each other: sequence s has the query tokens
  /// query_starts[s] … query_starts[s + 1] - 1 and the keys key_starts[s] … key_starts[s + 1] - 1 (`cu_seqlens`). More keys
  /// than queries: a prefix that was computed before. `offset` counts within a sequence. Not with key_ranges or a cache.
  index_t sequences = 0;
  const std::int32_t* query_starts = nullptr;  ///< [sequences + 1], from 0 to q_len; null: not packed
  const std::int32_t* key_starts = nullptr;    ///< [sequences + 1], within kv_len

  DIFFATTN_INLINE index_t query_offset(index_t q_len, index_t kv_len) const noexcept {
    return offset == align_to_end ? kv_len - q_len : offset;
  }
};

/// Where a query row belongs: the keys of its sequence or batch entry, and its own place among them.
struct row_place {
  index_t entry;  ///< the batch entry, or the packed sequence
  key_range keys;
  index_t own;
};

DIFFATTN_INLINE row_place place_of_row(const attention_mask& m, index_t q_len, index_t kv_len, index_t b,
                                       index_t row) noexcept {
  if (!m.query_starts) return {b, m.key_ranges ? m.key_ranges[b] : key_range{0, kv_len}, row + m.query_offset(q_len, kv_len)};
  index_t s = 0;  // the last sequence that begins at `row` or before: of several, all but the last are empty
  for (index_t end = m.sequences; end - s > 1;) {
    const index_t middle = s + (end - s) / 2;
    (m.query_starts[middle] <= row ? s : end) = middle;
  }
  const index_t first = m.key_starts[s], end = m.key_starts[s + 1], queries = m.query_starts[s + 1] - m.query_starts[s];
  return {s, {first, end}, first + row - m.query_starts[s] + m.query_offset(queries, end - first)};
}

/// The keys that query row `row` of batch entry `b` may see; begin == end if none.
DIFFATTN_INLINE key_range visible_keys(const attention_mask& m, index_t q_len, index_t kv_len, index_t b,
                                       index_t row) noexcept {
  const row_place place = place_of_row(m, q_len, kv_len, b, row);
  key_range keys = place.keys;
  if (!m.causal) return keys;
  const index_t first = m.query_starts ? keys.begin : 0, range_end = keys.end;
  index_t end = place.own + 1;
  if (m.prefixes && first + m.prefixes[place.entry] > end) end = first + m.prefixes[place.entry];
  if (end < keys.end) keys.end = end;
  if (m.window != attention_mask::unlimited && place.own - keys.begin >= m.window) keys.begin = place.own - m.window + 1;
  // A row without keys keeps its place in the order, inside the range: [x, x).
  if (keys.begin > range_end) keys.begin = range_end;
  if (keys.end < keys.begin) keys.end = keys.begin;
  return keys;
}

DIFFATTN_NAMESPACE_END
