// SPDX-License-Identifier: MIT
#pragma once

// Is a call meaningful? Shapes, strides, head indices and addresses only: no tensor element is read.

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "arguments.hpp"
#include "schedule/source.hpp"
#include "status.hpp"
#include "workspace.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace checks {

/// Sizes and strides stay below this, so that sums of a few of them cannot overflow.
inline constexpr index_t limit = index_t{1} << 60;

/// A workspace above this is refused: its size cannot be trusted any more.
inline constexpr std::size_t max_bytes = std::size_t{1} << 61;

/// More workers than that do not exist.
inline constexpr index_t max_workers = index_t{1} << 20;

/// Nor do more heads than that; the checks walk through them.
inline constexpr index_t max_heads = index_t{1} << 24;

/// |a| * |b|, or `limit` if that is more.
DIFFATTN_INLINE index_t capped_product(index_t a, index_t b) noexcept {
  if (a < 0) a = a == std::numeric_limits<index_t>::min() ? limit : -a;
  if (b < 0) b = b == std::numeric_limits<index_t>::min() ? limit : -b;
  if (a == 0 || b == 0) return 0;
  return a >= limit || b >= limit || a > limit / b ? limit : a * b;
}

/// The bytes between the first and the last element of a view; begin == end for an empty one.
struct byte_range {
  std::uintptr_t begin = 0, end = 0;
};

DIFFATTN_INLINE bool intersect(byte_range a, byte_range b) noexcept {
  return a.begin < b.end && b.begin < a.end;
}

/// One axis of a view: `size` steps of `stride` elements.
struct axis {
  index_t size, stride;
};

template <class T>
DIFFATTN_INLINE byte_range bytes_of(const T* data, const axis* axes, int n) noexcept {
  index_t low = 0, high = 0;
  for (int i = 0; i < n; ++i) {
    if (axes[i].size <= 0) return {};
    (axes[i].stride < 0 ? low : high) += (axes[i].size - 1) * axes[i].stride;
  }
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(data);
  return {at + static_cast<std::uintptr_t>(low) * sizeof(T), at + static_cast<std::uintptr_t>(high + 1) * sizeof(T)};
}

template <class T>
DIFFATTN_INLINE byte_range bytes_of(const tensor_view<T>& t) noexcept {
  const axis axes[4] = {{t.batch, t.batch_stride}, {t.tokens, t.token_stride}, {t.heads, t.head_stride}, {t.width, 1}};
  return t.data ? bytes_of(t.data, axes, 4) : byte_range{};
}

template <class T, class U>
DIFFATTN_INLINE byte_range bytes_of(const token_head_view<T>& t, const tensor_view<U>& shape) noexcept {
  const axis axes[3] = {{shape.batch, t.batch_stride}, {shape.tokens, t.token_stride}, {shape.heads, t.head_stride}};
  return t.data ? bytes_of(t.data, axes, 3) : byte_range{};
}

/// Do no two elements share an address? Sorted by stride, every axis must step over all that the smaller ones span.
/// (Sufficient, and necessary for every layout that nests its axes.)
DIFFATTN_INLINE bool distinct(axis* axes, int n) noexcept {
  index_t spanned = 1;
  for (int done = 0; done < n; ++done) {
    int least = done;
    for (int i = done; i < n; ++i) {
      if (axes[i].stride < 0) axes[i].stride = -axes[i].stride;
      if (axes[i].stride < axes[least].stride) least = i;
    }
    const axis a = axes[least];
    axes[least] = axes[done];
    if (a.size <= 1) continue;
    if (a.stride < spanned) return false;
    spanned += (a.size - 1) * a.stride;
  }
  return true;
}

template <class T>
DIFFATTN_INLINE bool distinct(const tensor_view<T>& t) noexcept {
  axis axes[4] = {{t.batch, t.batch_stride}, {t.tokens, t.token_stride}, {t.heads, t.head_stride}, {t.width, 1}};
  return distinct(axes, 4);
}

/// Do two views that repeat with the same period, in elements, take different places in it? `shift` bytes lie between their
/// first elements; within a period they span `out_span` and `in_span` elements of `size` bytes.
DIFFATTN_INLINE bool apart_in_period(index_t period, index_t out_span, index_t in_span, std::intptr_t shift,
                                     std::intptr_t size) noexcept {
  const std::intptr_t bytes = static_cast<std::intptr_t>(period) * size;
  std::intptr_t place = shift % bytes;
  if (place < 0) place += bytes;
  return place >= out_span * size && place + in_span * size <= bytes;
}

/// May `out` and `in` share an element? Besides disjoint ranges this knows the interleavings that engines use: columns of the
/// same rows (equal token strides, batches whole rows apart) and slots of the same batch entries (equal batch strides).
template <class T, class U>
DIFFATTN_INLINE bool may_overlap(const tensor_view<T>& out, const tensor_view<U>& in) noexcept {
  if (!intersect(bytes_of(out), bytes_of(in))) return false;
  if (out.head_stride < 0 || in.head_stride < 0) return true;
  constexpr std::intptr_t size = static_cast<std::intptr_t>(sizeof(T));
  const std::intptr_t shift = reinterpret_cast<std::intptr_t>(in.data) - reinterpret_cast<std::intptr_t>(out.data);
  const index_t out_row = (out.heads - 1) * out.head_stride + out.width, in_row = (in.heads - 1) * in.head_stride + in.width;
  const index_t row = out.token_stride, entry = out.batch_stride;
  if (row > 0 && row == in.token_stride && out.batch_stride % row == 0 && in.batch_stride % row == 0 &&
      apart_in_period(row, out_row, in_row, shift, size))
    return false;
  if (entry > 0 && entry == in.batch_stride && row >= 0 && in.token_stride >= 0 &&
      apart_in_period(entry, (out.tokens - 1) * row + out_row, (in.tokens - 1) * in.token_stride + in_row, shift, size))
    return false;
  return true;
}

/// Null data, sizes and strides of one tensor; the four codes in the order null, size, width stride.
template <class T>
DIFFATTN_INLINE status tensor(const tensor_view<T>& t, status null, status size, status width_stride) noexcept {
  if (t.batch < 0 || t.tokens < 0 || t.heads < 0 || t.width <= 0) return size;
  const index_t extents[4] = {capped_product(t.batch, t.batch_stride), capped_product(t.tokens, t.token_stride),
                              capped_product(t.heads, t.head_stride), t.width};
  for (const index_t e : extents)
    if (e >= limit / 64) return size;  // 4 extents × 8 bytes stay below `limit`
  if (capped_product(capped_product(t.batch, t.tokens), capped_product(t.heads, t.width)) >= limit / 64) return size;
  if (t.width_stride != 1 && t.width > 1) return width_stride;
  const bool empty = t.batch == 0 || t.tokens == 0 || t.heads == 0;
  return t.data == nullptr && !empty ? null : status::ok;
}

/// Packed sequences: starts that do not descend, from 0 to q_len and within the keys.
DIFFATTN_INLINE status packed(const attention_mask& m, index_t batch, index_t q_len, const schedule::source& from) noexcept {
  if (from.is_cache()) return status::mask_packed_cache;
  if (m.key_ranges) return status::mask_packed_key_ranges;
  const std::int32_t *const q = m.query_starts, *const k = m.key_starts;
  const index_t n = m.sequences;
  if (n <= 0 || n >= limit / 64 || !q || !k) return status::mask_packed;
  if (batch != 1) return batch == 0 ? status::ok : status::mask_packed_batch;
  if (q[0] != 0 || q[n] != q_len || k[0] < 0 || k[n] > from.length(0)) return status::mask_packed;
  for (index_t s = 0; s < n; ++s) {
    if (q[s + 1] < q[s] || k[s + 1] < k[s]) return status::mask_packed;
    if (m.prefixes && (m.prefixes[s] < 0 || m.prefixes[s] > k[s + 1] - k[s])) return status::mask_prefix;
  }
  return status::ok;
}

DIFFATTN_INLINE status mask(const attention_mask& m, index_t batch, index_t q_len, const schedule::source& from) noexcept {
  if (m.causal && m.offset != attention_mask::align_to_end && (m.offset > 4 * limit || m.offset < -4 * limit))
    return status::mask_offset;
  if (m.window != attention_mask::unlimited) {
    if (m.window <= 0) return status::mask_window;
    if (!m.causal) return status::mask_window_not_causal;
  }
  if (m.prefixes && !m.causal) return status::mask_prefix_not_causal;
  if (m.query_starts || m.key_starts || m.sequences != 0) return packed(m, batch, q_len, from);
  for (index_t b = 0; b < batch; ++b) {
    const key_range r = m.key_ranges ? m.key_ranges[b] : key_range{};
    if (r.begin < 0 || r.end < r.begin || r.end > from.length(b)) return status::mask_key_range;
    if (m.prefixes && (m.prefixes[b] < 0 || m.prefixes[b] > from.length(b))) return status::mask_prefix;
  }
  return status::ok;
}

/// The keys of the longest batch entry.
DIFFATTN_INLINE index_t most_keys(index_t batch, const schedule::source& from) noexcept {
  index_t most = 0;
  for (index_t b = 0; b < batch; ++b)
    if (from.length(b) > most) most = from.length(b);
  return most;
}

/// Does f(row) hold for the list of every block of queries? row[0] and row[1] are where its key blocks begin and end.
template <class T, class F>
DIFFATTN_INLINE bool all_rows(const block_list& l, const forward_args<T>& a, F&& f) noexcept {
  for (index_t b = 0; b < (l.batch_stride == 0 ? 1 : a.out.batch); ++b)
    for (index_t h = 0; h < (l.head_stride == 0 ? 1 : a.out.heads); ++h)
      for (index_t query = 0; query < a.out.tokens; query += l.query_block)
        if (!f(l.row(b, h, query))) return false;
  return true;
}

/// Lists of blocks: every number in its place.
template <class T>
DIFFATTN_INLINE status blocks(const block_list& l, const forward_args<T>& a, index_t kv_len) noexcept {
  if (!l.begins) return l.keys ? status::logits_blocks : status::ok;
  if (l.query_block <= 0 || l.key_block <= 0 || l.query_block >= limit / 64 || l.key_block >= limit / 64)
    return status::logits_blocks;
  if (capped_product(a.out.batch, l.batch_stride) >= limit / 64 || capped_product(a.out.heads, l.head_stride) >= limit / 64)
    return status::logits_strides;
  const index_t key_blocks = (kv_len + l.key_block - 1) / l.key_block;
  const auto valid = [&](const index_t* row) {
    if (row[0] < 0 || row[1] < row[0] || (row[1] > row[0] && !l.keys)) return false;
    for (index_t i = row[0]; i < row[1]; ++i)
      if (l.keys[i] < 0 || l.keys[i] >= key_blocks || (i > row[0] && l.keys[i] <= l.keys[i - 1])) return false;
    return true;
  };
  return all_rows(l, a, valid) ? status::ok : status::logits_blocks;
}

/// The rules of a map.
template <class T>
DIFFATTN_INLINE status rules(const logit_rules<compute_type<T>>& r, const forward_args<T>& a, index_t kv_len) noexcept {
  if (!std::isfinite(r.soft_cap * compute_type<T>(1.5)) || r.soft_cap < 0) return status::logits_soft_cap;
  if (!r.predicate.sees && (r.predicate.tile || r.predicate.context)) return status::logits_predicate;
  const auto far = [&](const auto& v) {
    const axis axes[4] = {
        {a.out.batch, v.batch_stride}, {a.out.heads, v.head_stride}, {a.out.tokens, v.query_stride}, {kv_len, v.key_stride}};
    bool is_far = false;
    for (const axis& x : axes) is_far |= v.data && capped_product(x.size, x.stride) >= limit / 64;
    return is_far;
  };
  if (far(r.bias) || far(r.visible)) return status::logits_strides;
  return blocks(r.blocks, a, kv_len);
}

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

/// Do the tensors have the heads that the map reads?
template <class T>
DIFFATTN_INLINE status heads(const forward_args<T>& a, const kv_rows& k, const kv_rows& v) noexcept {
  const head_map& m = a.heads;
  head_counts n;
  if (const status s = heads(m, n); s != status::ok) return s;
  if (a.out.heads != m.heads) return status::out_heads;
  const bool exact = m.queries != head_map::pairing::table;  // a table may leave heads unused
  if (n.queries > a.q.heads || (exact && n.queries != a.q.heads)) return status::q_heads;
  if (n.keys > k.heads || (exact && n.keys != k.heads)) return status::k_heads;
  if (n.values > v.heads || (exact && n.values != v.heads)) return status::v_heads;
  return a.out.width == (n.two_values ? 2 * v.width : v.width) ? status::ok : status::out_width;
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

/// The arrays that a call reads beside q, k and v.
struct parameter_ranges {
  byte_range ranges[26];
};

template <class T>
DIFFATTN_INLINE parameter_ranges parameters_of(const forward_args<T>& a) noexcept {
  const schedule::source from(a);
  const index_t sequences = a.mask.query_starts ? a.mask.sequences : a.q.batch, kv_len = most_keys(a.q.batch, from);
  const auto array = [](const auto* data, index_t n) {
    const axis axes[1] = {{n, 1}};
    return data ? bytes_of(data, axes, 1) : byte_range{};
  };
  const auto logits = [&](const auto& v) {
    const axis axes[4] = {
        {a.out.batch, v.batch_stride}, {a.out.heads, v.head_stride}, {a.out.tokens, v.query_stride}, {kv_len, v.key_stride}};
    return v.data ? bytes_of(v.data, axes, 4) : byte_range{};
  };
  const auto begins = [&](const block_list& l) {
    const index_t rows = l.begins ? (a.out.tokens + l.query_block - 1) / l.query_block + 1 : 0;
    const axis axes[3] = {{a.out.batch, l.batch_stride}, {a.out.heads, l.head_stride}, {rows, 1}};
    return l.begins ? bytes_of(l.begins, axes, 3) : byte_range{};
  };
  const auto listed = [&](const block_list& l) {
    index_t first = std::numeric_limits<index_t>::max(), end = 0;
    if (l.begins)
      all_rows(l, a, [&](const index_t* row) {
        if (row[0] < row[1] && row[0] < first) first = row[0];
        if (row[0] < row[1] && row[1] > end) end = row[1];
        return true;
      });
    return first < end ? array(l.keys + first, end - first) : byte_range{};
  };
  const auto& r1 = a.logits;
  const auto& r2 = a.logits_2 ? *a.logits_2 : a.logits;
  return {{bytes_of(a.lambda.array(), a.out),
           bytes_of(a.alpha.array(), a.out),
           array(a.norm.weight, a.out.width),
           array(a.norm.bias, a.out.width),
           array(a.mask.key_ranges, a.q.batch),
           array(a.mask.prefixes, sequences),
           array(a.mask.query_starts, sequences + 1),
           array(a.mask.key_starts, sequences + 1),
           array(r1.slopes, a.out.heads),
           array(r1.sinks, a.out.heads),
           array(r2.slopes, a.out.heads),
           array(r2.sinks, a.out.heads),
           logits(r1.bias),
           logits(r1.visible),
           logits(r2.bias),
           logits(r2.visible),
           begins(r1.blocks),
           begins(r2.blocks),
           listed(r1.blocks),
           listed(r2.blocks),
           array(a.heads.queries == head_map::pairing::table ? a.heads.entries : nullptr, a.heads.heads),
           array(a.sequences, a.q.batch),
           array(a.cache.table, a.cache.sequences * a.cache.table_pages),
           array(a.cache.lengths, a.cache.sequences),
           array(a.cache.begins, a.cache.sequences),
           array(a.cache.references, a.cache.pages)}};
}

template <class T>
DIFFATTN_INLINE bool intersects_input(byte_range r, const forward_args<T>& a) noexcept {
  bool hit = intersect(r, bytes_of(a.q)) || intersect(r, bytes_of(a.k)) || intersect(r, bytes_of(a.v)) ||
             intersect(r, bytes_of(a.cache.keys, a.cache)) || intersect(r, bytes_of(a.cache.values, a.cache));
  for (const byte_range& p : parameters_of(a).ranges) hit |= intersect(r, p);
  return hit;
}

/// A coefficient: there, made for this call, and of strides that do not overflow.
template <class T>
DIFFATTN_INLINE status coefficient(const lambda_view<compute_type<T>>& x, const forward_args<T>& a, status missing,
                                   status shape) noexcept {
  const bool empty = a.out.batch == 0 || a.out.tokens == 0;
  if (!x.is_given() && !empty) return missing;
  if (!x.fits(a.out.tokens, a.out.heads)) return shape;
  const token_head_view<const compute_type<T>>& v = x.array();
  const index_t extents[3] = {capped_product(a.out.batch, v.batch_stride), capped_product(a.out.tokens, v.token_stride),
                              capped_product(a.out.heads, v.head_stride)};
  for (const index_t e : extents)
    if (e >= limit / 64) return shape;
  return status::ok;
}

/// All numbers of the epilogue.
template <class T>
DIFFATTN_INLINE status coefficients(const forward_args<T>& a) noexcept {
  using real = compute_type<T>;
  status s = coefficient(a.lambda, a, status::lambda_missing, status::lambda_shape);
  if (s == status::ok) s = coefficient(a.alpha, a, status::alpha_missing, status::alpha_shape);
  if (s != status::ok) return s;
  if (!std::isfinite(a.norm.eps) || a.norm.eps < real(0)) return status::norm_eps;
  if (!std::isfinite(a.norm.gain)) return status::norm_gain;
  if (a.norm.bias && a.norm.kind != norm_kind::group) return status::norm_bias;
  return status::ok;
}

/// Optional outputs: distinct elements, away from everything else.
template <class T>
DIFFATTN_INLINE status optional_outputs(const forward_args<T>& a) noexcept {
  const tensor_view<compute_type<T>>* const raw[2] = {&a.out1, &a.out2};
  const token_head_view<compute_type<T>>* const lse[2] = {&a.lse1, &a.lse2};
  byte_range outputs[5] = {bytes_of(a.out)};
  int known = 1;
  const auto clashes = [&](byte_range r) {
    bool hit = intersects_input(r, a);
    for (int i = 0; i < known; ++i) hit |= intersect(r, outputs[i]);
    outputs[known++] = r;
    return hit;
  };
  for (const tensor_view<compute_type<T>>* r : raw) {
    if (!r->data) continue;
    if (r->batch != a.out.batch || r->tokens != a.out.tokens || r->heads != a.out.heads || r->width != a.out.width ||
        tensor(*r, status::raw_out_shape, status::raw_out_shape, status::raw_out_shape) != status::ok)
      return status::raw_out_shape;
    if (!distinct(*r)) return status::raw_out_strides;
    if (clashes(bytes_of(*r))) return status::raw_out_overlap;
  }
  for (const token_head_view<compute_type<T>>* l : lse) {
    if (!l->data) continue;
    axis axes[3] = {{a.out.batch, l->batch_stride}, {a.out.tokens, l->token_stride}, {a.out.heads, l->head_stride}};
    for (const axis& x : axes)
      if (capped_product(x.size, x.stride) >= limit / 64) return status::lse_strides;
    const byte_range r = bytes_of(l->data, axes, 3);
    if (!distinct(axes, 3)) return status::lse_strides;
    if (clashes(r)) return status::lse_overlap;
  }
  return status::ok;
}

/// All that both kinds of call share.
template <class T>
DIFFATTN_INLINE status arguments(const forward_args<T>& a) noexcept {
  static_assert(is_element<T>, "diffattn takes tensors of float, double, f16 and bf16");
  const bool cached = a.cache.is_given();
  status s = tensor(a.q, status::q_null, status::q_size, status::q_width_stride);
  if (cached) {
    if (s == status::ok) s = cache(a);
  } else {
    if (s == status::ok) s = tensor(a.k, status::k_null, status::k_size, status::k_width_stride);
    if (s == status::ok) s = tensor(a.v, status::v_null, status::v_size, status::v_width_stride);
  }
  if (s == status::ok) s = tensor(a.out, status::out_null, status::out_size, status::out_width_stride);
  if (s != status::ok) return s;
  if (!cached) {
    if (a.k.batch != a.q.batch) return status::k_batch;
    if (a.v.batch != a.q.batch) return status::v_batch;
    if (a.v.tokens != a.k.tokens) return status::v_tokens;
    if (a.sequences) return status::cache_sequence;
  }
  if (a.out.batch != a.q.batch) return status::out_batch;
  if (a.out.tokens != a.q.tokens) return status::out_tokens;
  const schedule::source from(a);
  if (from.keys().width != a.q.width) return status::k_width;
  if ((s = heads(a, from.keys(), from.values())) != status::ok) return s;
  if (cached && !cache_matches(a)) return status::cache_heads;
  if ((s = coefficients(a)) != status::ok) return s;
  if (!std::isfinite(a.scale * compute_type<T>(1.5))) return status::scale_not_finite;  // the kernels use scale · log2 e
  if (a.schedule != schedule_choice::automatic && a.schedule != schedule_choice::panels &&
      a.schedule != schedule_choice::stream)
    return status::schedule_unknown;
  if ((s = mask(a.mask, a.q.batch, a.q.tokens, from)) != status::ok) return s;
  const index_t kv_len = most_keys(a.q.batch, from);
  if ((s = rules(a.logits, a, kv_len)) != status::ok) return s;
  if (a.logits_2 && (s = rules(*a.logits_2, a, kv_len)) != status::ok) return s;
  if (cached && (s = cache_pages(a)) != status::ok) return s;
  if (!distinct(a.out)) return status::out_strides;
  if (may_overlap(a.out, a.q)) return status::out_overlaps_q;
  if (may_overlap(a.out, a.k)) return status::out_overlaps_k;
  if (may_overlap(a.out, a.v)) return status::out_overlaps_v;
  if (intersect(bytes_of(a.out), bytes_of(a.cache.keys, a.cache)) ||
      intersect(bytes_of(a.out), bytes_of(a.cache.values, a.cache)))
    return status::out_overlaps_cache;
  for (const byte_range& p : parameters_of(a).ranges)
    if (intersect(bytes_of(a.out), p)) return status::out_overlaps_parameter;
  return optional_outputs(a);
}

/// The number of workers of an executor.
DIFFATTN_INLINE status workers(index_t n) noexcept {
  return n < 1 ? status::executor_workers : n > max_workers ? status::workspace_overflow : status::ok;
}

/// May sequences grow to `kv_len` tokens, as far as arithmetic goes?
template <class T>
DIFFATTN_INLINE bool length_is_possible(const forward_args<T>& a, index_t kv_len) noexcept {
  const index_t heads = a.q.heads + a.cache.keys.heads + a.cache.values.heads;
  return a.cache.is_given() && kv_len >= 0 &&
         capped_product(capped_product(kv_len, a.q.width + a.out.width), heads) < limit / 64;
}

/// The memory of a call: large enough, and apart from every tensor.
template <class T>
DIFFATTN_INLINE status memory(const forward_args<T>& a, workspace w, std::size_t needed) noexcept {
  if (needed == 0) return status::ok;
  if (needed > max_bytes) return status::workspace_overflow;
  if (!w.data) return status::workspace_null;
  if (w.bytes < needed) return status::workspace_too_small;
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(w.data);
  const byte_range mine{at, at + w.bytes};
  const bool hit = intersects_input(mine, a) || intersect(mine, bytes_of(a.out)) || intersect(mine, bytes_of(a.out1)) ||
                   intersect(mine, bytes_of(a.out2)) || intersect(mine, bytes_of(a.lse1, a.out)) ||
                   intersect(mine, bytes_of(a.lse2, a.out));
  return hit ? status::workspace_overlap : status::ok;
}

}  // namespace checks
DIFFATTN_ISA_NAMESPACE_END
