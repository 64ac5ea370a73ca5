// SPDX-License-Identifier: MIT
#pragma once

// Are the heads that a call names, and a cache that it reads, what they must be?

#include <limits>
#include <type_traits>

#include "check_memory.hpp"
#include "schedule/source.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace checks {

/// The heads that a map reads: exactly these many there must be, unless it is a table.
struct head_counts {
  index_t queries = 0, keys = 0, values = 0;
  bool two_values = false;
};

/// Is the map meaningful by itself?
DIFFATTN_INLINE status heads(const head_map& m, head_counts& n) noexcept {
  using pairing = head_map::pairing;
  using grouping = head_map::grouping;
  if (m.heads <= 0 || m.heads > max_heads || m.kv <= 0 || m.ratio <= 0) return status::heads_missing;
  if (m.queries == pairing::table) {
    if (!m.entries) return status::heads_table_null;
  } else {
    const bool repeated_halves = m.queries == pairing::halves && m.keys == grouping::repeated;
    if ((repeated_halves ? 2 * m.heads : m.heads) % m.kv != 0)
      return m.keys == grouping::shared && (2 * m.heads) % m.kv == 0 && m.queries != pairing::single
                 ? status::heads_pair_across_kv_groups
                 : status::heads_kv_groups;
    if (m.heads % m.ratio != 0) return status::heads_kv_groups;
    if (m.queries == pairing::grouped && m.heads / m.ratio % m.kv != 0) return status::heads_pair_across_kv_groups;
  }
  const auto raise = [](index_t& count, index_t head) {
    if (head >= count) count = head + 1;
  };
  n = {};
  n.two_values = m[0].value_2 >= 0;
  for (index_t h = 0; h < m.heads; ++h) {
    const head_indices i = m[h];
    const auto possible = [](index_t head) { return head >= 0 && head < 2 * max_heads; };
    if (!possible(i.query_1) || !possible(i.query_2)) return status::q_heads;
    if (!possible(i.key_1) || !possible(i.key_2)) return status::k_heads;
    if (!possible(i.value_1) || (i.value_2 != -1 && !possible(i.value_2))) return status::v_heads;
    if ((i.value_2 >= 0) != n.two_values) return status::heads_value_layout;
    raise(n.queries, i.query_1), raise(n.queries, i.query_2), raise(n.keys, i.key_1), raise(n.keys, i.key_2);
    raise(n.values, i.value_1), raise(n.values, i.value_2);
  }
  return status::ok;
}

/// The bytes of all pages.
DIFFATTN_INLINE byte_range bytes_of(const kv_rows& r, const kv_view& kv) noexcept {
  const axis axes[4] = {
      {kv.pages, r.page_stride}, {r.heads, r.head_stride}, {kv.page_tokens, r.token_stride}, {row_bytes(r.type, r.width), 1}};
  return r.data ? bytes_of(static_cast<const unsigned char*>(r.data), axes, 4) : byte_range{};
}

/// The key rows or value rows of a cache.
template <class T>
DIFFATTN_INLINE status cache_rows(const kv_rows& r, const kv_view& kv) noexcept {
  if (r.heads <= 0 || r.heads > max_heads || r.width <= 0 || r.width >= limit / 64) return status::cache_shape;
  const index_t extents[3] = {capped_product(kv.pages, r.page_stride), capped_product(r.heads, r.head_stride),
                              capped_product(kv.page_tokens, r.token_stride)};
  for (const index_t e : extents)
    if (e >= limit / 8) return status::cache_shape;
  if (capped_product(capped_product(kv.page_tokens, kv.table_pages), capped_product(r.heads, r.width)) >= limit / 64)
    return status::cache_shape;
  if (!r.data && kv.pages > 0) return status::cache_shape;
  const int type = static_cast<int>(r.type);
  const bool known = type >= 0 && type <= static_cast<int>(storage::q6);
  return known && (r.type == storage::f64) == std::is_same_v<compute_type<T>, double> ? status::ok : status::cache_storage;
}

/// The cache by itself, and the sequences that the call names.
template <class T>
DIFFATTN_INLINE status cache(const forward_args<T>& a) noexcept {
  const kv_view& kv = a.cache;
  const schedule::source from(a);
  if (a.k.data || a.v.data || a.k.tokens != 0 || a.v.tokens != 0) return status::cache_and_tensors;
  if (kv.sequences < 0 || kv.pages < 0 || kv.page_tokens <= 0 || kv.table_pages <= 0 || (!kv.table && kv.table_pages != 1) ||
      kv.pages > std::numeric_limits<std::int32_t>::max() || capped_product(kv.sequences, kv.table_pages) >= limit / 64 ||
      capped_product(kv.page_tokens, kv.table_pages) >= limit / 64)
    return status::cache_shape;
  status s = cache_rows<T>(kv.keys, kv);
  if (s == status::ok) s = cache_rows<T>(kv.values, kv);
  if (s != status::ok) return s;
  if (!a.sequences && a.q.batch != kv.sequences && a.q.batch != 0) return status::cache_sequence;
  for (index_t b = 0; b < a.q.batch; ++b) {
    const index_t n = from.sequence(b);
    if (n < 0 || n >= kv.sequences) return status::cache_sequence;
    if (kv.begin(n) < 0 || kv.length(n) < kv.begin(n) || kv.length(n) >= limit / 64) return status::cache_shape;
  }
  return status::ok;
}

/// Are the keys that the call's queries see in the cache? Every page that holds one is looked at.
template <class T>
DIFFATTN_INLINE status cache_pages(const forward_args<T>& a) noexcept {
  const kv_view& kv = a.cache;
  const schedule::source from(a);
  for (index_t b = 0; b < a.q.batch && a.q.tokens > 0; ++b) {
    const index_t n = from.sequence(b);
    const key_range seen = schedule::keys_of_rows(a.mask, a.q.tokens, kv.length(n), b, 0, a.q.tokens - 1);
    if (seen.begin >= seen.end) continue;
    if (seen.begin < kv.begin(n) || kv.length(n) - seen.begin > kv.page_tokens * kv.table_pages) return status::cache_range;
    for (index_t t = seen.begin; t < seen.end; t = (t / kv.page_tokens + 1) * kv.page_tokens) {
      const index_t page = kv.page(n, t);
      if (page < 0 || page >= kv.pages || (kv.references && kv.references[page] <= 0)) return status::cache_page;
    }
  }
  return status::ok;
}

/// Does the call read heads in the way that the cache was filled?
template <class T>
DIFFATTN_INLINE bool cache_matches(const forward_args<T>& a) noexcept {
  head_counts n;
  return a.cache.heads.heads == 0 || (heads(a.cache.heads, n) == status::ok && same_heads(a.cache.heads, a.heads));
}

}  // namespace checks
DIFFATTN_ISA_NAMESPACE_END
