// SPDX-License-Identifier: MIT
#pragma once

// Which keys a query row may see. Every restriction here leaves one interval of keys for each row, and both ends of the
// interval never move down from one row to the next; kernels ask `visible_keys` and nothing else.
//
// Causal, drawn for 3 queries (rows) on 5 keys; the default aligns the last query with the last key, as a cache needs:
//
//   offset = kv_len - q_len = 2        offset = 0
//     x x x . .                          x . . . .
//     x x x x .                          x x . . .
//     x x x x x                          x x x . .

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
  /// The position of query 0 among the keys; kv_len - q_len unless given. Only read if `causal`.
  index_t offset = align_to_end;
  /// Query i sees its own key i + offset and the window - 1 keys before it. Needs `causal`.
  index_t window = unlimited;
  /// Padding: [batch] ranges of keys that hold data, within [0, kv_len); null = all. Keys outside are never read.
  const key_range* key_ranges = nullptr;

  DIFFATTN_INLINE index_t query_offset(index_t q_len, index_t kv_len) const noexcept {
    return offset == align_to_end ? kv_len - q_len : offset;
  }
};

/// The keys that query row `row` of batch entry `b` may see; begin == end if none.
DIFFATTN_INLINE key_range visible_keys(const attention_mask& m, index_t q_len, index_t kv_len, index_t b,
                                       index_t row) noexcept {
  key_range keys = m.key_ranges ? m.key_ranges[b] : key_range{0, kv_len};
  if (!m.causal) return keys;
  const index_t range_end = keys.end;
  const index_t own = row + m.query_offset(q_len, kv_len);
  if (own + 1 < keys.end) keys.end = own + 1;
  if (m.window != attention_mask::unlimited && own - keys.begin >= m.window) keys.begin = own - m.window + 1;
  // A row without keys keeps its place in the order, inside the range: [x, x).
  if (keys.begin > range_end) keys.begin = range_end;
  if (keys.end < keys.begin) keys.end = keys.begin;
  return keys;
}

DIFFATTN_NAMESPACE_END
