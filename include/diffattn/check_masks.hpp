// SPDX-License-Identifier: MIT
#pragma once

// Is a mask meaningful? Every number of its lists is looked at, no element of bias or visible.

#include <cmath>

#include "check_memory.hpp"
#include "schedule/source.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace checks {

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
  if (m.offset != attention_mask::align_to_end && (m.offset > 4 * limit || m.offset < -4 * limit)) return status::mask_offset;
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
  const auto lists = [](index_t n, index_t stride) { return stride == 0 && n > 1 ? 1 : n; };
  for (index_t b = 0; b < lists(a.out.batch, l.batch_stride); ++b)
    for (index_t h = 0; h < lists(a.out.heads, l.head_stride); ++h)
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

}  // namespace checks
DIFFATTN_ISA_NAMESPACE_END
