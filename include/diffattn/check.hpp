// SPDX-License-Identifier: MIT
#pragma once

// Is a call meaningful? Shapes, strides, head indices and addresses only: no tensor element is read.

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "arguments.hpp"
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
  return bytes_of(t.data, axes, 4);
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

DIFFATTN_INLINE status mask(const attention_mask& m, index_t batch, index_t kv_len) noexcept {
  if (m.causal && m.offset != attention_mask::align_to_end && (m.offset > 4 * limit || m.offset < -4 * limit))
    return status::mask_offset;
  if (m.window != attention_mask::unlimited) {
    if (m.window <= 0) return status::mask_window;
    if (!m.causal) return status::mask_window_not_causal;
  }
  if (m.key_ranges)
    for (index_t b = 0; b < batch; ++b) {
      const key_range r = m.key_ranges[b];
      if (r.begin < 0 || r.end < r.begin || r.end > kv_len) return status::mask_key_range;
    }
  return status::ok;
}

/// Everything about head counts. `signal` heads are out's, the rest must be exactly what the map reads.
template <class T>
DIFFATTN_INLINE status heads(const forward_args<T>& a) noexcept {
  using pairing = head_map::pairing;
  using grouping = head_map::grouping;
  const head_map& m = a.heads;
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
  if (a.out.heads != m.heads) return status::out_heads;
  index_t queries = 0, keys = 0, values = 0;
  const auto raise = [](index_t& count, index_t head) {
    if (head >= count) count = head + 1;
  };
  const bool two = m[0].value_2 >= 0;
  for (index_t h = 0; h < m.heads; ++h) {
    const head_indices i = m[h];
    if (i.query_1 < 0 || i.query_2 < 0) return status::q_heads;
    if (i.key_1 < 0 || i.key_2 < 0) return status::k_heads;
    if (i.value_1 < 0 || i.value_2 < -1) return status::v_heads;
    if ((i.value_2 >= 0) != two) return status::heads_value_layout;
    raise(queries, i.query_1), raise(queries, i.query_2), raise(keys, i.key_1), raise(keys, i.key_2);
    raise(values, i.value_1), raise(values, i.value_2);
  }
  const bool exact = m.queries != pairing::table;  // a table may leave heads unused
  if (queries > a.q.heads || (exact && queries != a.q.heads)) return status::q_heads;
  if (keys > a.k.heads || (exact && keys != a.k.heads)) return status::k_heads;
  if (values > a.v.heads || (exact && values != a.v.heads)) return status::v_heads;
  return a.out.width == (two ? 2 * a.v.width : a.v.width) ? status::ok : status::out_width;
}

/// The small arrays that a call reads beside q, k and v.
struct parameter_ranges {
  byte_range ranges[6];
};

template <class T>
DIFFATTN_INLINE parameter_ranges parameters_of(const forward_args<T>& a) noexcept {
  const auto array = [](const auto* data, index_t n) {
    const axis axes[1] = {{n, 1}};
    return data ? bytes_of(data, axes, 1) : byte_range{};
  };
  return {{bytes_of(a.lambda.array(), a.out), bytes_of(a.alpha.array(), a.out), array(a.norm.weight, a.out.width),
           array(a.norm.bias, a.out.width), array(a.mask.key_ranges, a.q.batch),
           array(a.heads.queries == head_map::pairing::table ? a.heads.entries : nullptr, a.heads.heads)}};
}

template <class T>
DIFFATTN_INLINE bool intersects_input(byte_range r, const forward_args<T>& a) noexcept {
  bool hit = intersect(r, bytes_of(a.q)) || intersect(r, bytes_of(a.k)) || intersect(r, bytes_of(a.v));
  for (const byte_range& p : parameters_of(a).ranges) hit |= intersect(r, p);
  return hit;
}

/// A coefficient: there, made for this call, and of strides that do not overflow.
template <class T>
DIFFATTN_INLINE status coefficient(const lambda_view<T>& x, const forward_args<T>& a, status missing, status shape) noexcept {
  const bool empty = a.out.batch == 0 || a.out.tokens == 0;
  if (!x.is_given() && !empty) return missing;
  if (!x.fits(a.out.tokens, a.out.heads)) return shape;
  const token_head_view<const T>& v = x.array();
  const index_t extents[3] = {capped_product(a.out.batch, v.batch_stride), capped_product(a.out.tokens, v.token_stride),
                              capped_product(a.out.heads, v.head_stride)};
  for (const index_t e : extents)
    if (e >= limit / 64) return shape;
  return status::ok;
}

/// Optional outputs: distinct elements, away from everything else.
template <class T>
DIFFATTN_INLINE status optional_outputs(const forward_args<T>& a) noexcept {
  const tensor_view<T>* const raw[2] = {&a.out1, &a.out2};
  const token_head_view<T>* const lse[2] = {&a.lse1, &a.lse2};
  byte_range outputs[5] = {bytes_of(a.out)};
  int known = 1;
  const auto clashes = [&](byte_range r) {
    bool hit = intersects_input(r, a);
    for (int i = 0; i < known; ++i) hit |= intersect(r, outputs[i]);
    outputs[known++] = r;
    return hit;
  };
  for (const tensor_view<T>* r : raw) {
    if (!r->data) continue;
    if (r->batch != a.out.batch || r->tokens != a.out.tokens || r->heads != a.out.heads || r->width != a.out.width ||
        tensor(*r, status::raw_out_shape, status::raw_out_shape, status::raw_out_shape) != status::ok)
      return status::raw_out_shape;
    if (!distinct(*r)) return status::raw_out_strides;
    if (clashes(bytes_of(*r))) return status::raw_out_overlap;
  }
  for (const token_head_view<T>* l : lse) {
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
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>, "diffattn computes in float or double");
  status s = tensor(a.q, status::q_null, status::q_size, status::q_width_stride);
  if (s == status::ok) s = tensor(a.k, status::k_null, status::k_size, status::k_width_stride);
  if (s == status::ok) s = tensor(a.v, status::v_null, status::v_size, status::v_width_stride);
  if (s == status::ok) s = tensor(a.out, status::out_null, status::out_size, status::out_width_stride);
  if (s != status::ok) return s;
  if (a.k.batch != a.q.batch) return status::k_batch;
  if (a.v.batch != a.q.batch) return status::v_batch;
  if (a.out.batch != a.q.batch) return status::out_batch;
  if (a.v.tokens != a.k.tokens) return status::v_tokens;
  if (a.out.tokens != a.q.tokens) return status::out_tokens;
  if (a.k.width != a.q.width) return status::k_width;
  if ((s = heads(a)) != status::ok) return s;
  if ((s = coefficient(a.lambda, a, status::lambda_missing, status::lambda_shape)) != status::ok) return s;
  if ((s = coefficient(a.alpha, a, status::alpha_missing, status::alpha_shape)) != status::ok) return s;
  if (!std::isfinite(a.scale * T(1.5))) return status::scale_not_finite;  // the kernels use scale · log2 e
  if (!std::isfinite(a.norm.eps) || a.norm.eps < T(0)) return status::norm_eps;
  if (!std::isfinite(a.norm.gain)) return status::norm_gain;
  if (a.norm.bias && a.norm.kind != norm_kind::group) return status::norm_bias;
  if ((s = mask(a.mask, a.q.batch, a.k.tokens)) != status::ok) return s;
  if (!distinct(a.out)) return status::out_strides;
  if (may_overlap(a.out, a.q)) return status::out_overlaps_q;
  if (may_overlap(a.out, a.k)) return status::out_overlaps_k;
  if (may_overlap(a.out, a.v)) return status::out_overlaps_v;
  for (const byte_range& p : parameters_of(a).ranges)
    if (intersect(bytes_of(a.out), p)) return status::out_overlaps_parameter;
  return optional_outputs(a);
}

/// The number of workers of an executor.
DIFFATTN_INLINE status workers(index_t n) noexcept {
  return n < 1 ? status::executor_workers : n > max_workers ? status::workspace_overflow : status::ok;
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
