// SPDX-License-Identifier: MIT
#pragma once

// Is a call meaningful? Shapes, strides, head indices and addresses only: no tensor element is read.

#include <cmath>

#include "check_keys.hpp"
#include "check_masks.hpp"
#include "workspace.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace checks {

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
  if (s == status::ok) s = tensor(a.out, status::out_null, status::out_size, status::out_width_stride);
  if (s != status::ok) return s;
  // First of all, so that arrays of an index for each batch entry are not read further than the caller means.
  if (a.out.batch != a.q.batch) return status::out_batch;
  if (a.out.tokens != a.q.tokens) return status::out_tokens;
  if (cached) {
    s = cache(a);
  } else {
    s = tensor(a.k, status::k_null, status::k_size, status::k_width_stride);
    if (s == status::ok) s = tensor(a.v, status::v_null, status::v_size, status::v_width_stride);
  }
  if (s != status::ok) return s;
  if (!cached) {
    if (a.k.batch != a.q.batch) return status::k_batch;
    if (a.v.batch != a.q.batch) return status::v_batch;
    if (a.v.tokens != a.k.tokens) return status::v_tokens;
    if (a.sequences) return status::cache_missing;
  }
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
