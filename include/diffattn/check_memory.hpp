// SPDX-License-Identifier: MIT
#pragma once

// Where arguments lie: extents that do not overflow, elements that do not share an address, arrays that do not overlap.

#include <cstdint>
#include <limits>

#include "status.hpp"
#include "tensor.hpp"

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
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(data), last = std::numeric_limits<std::uintptr_t>::max();
  const std::uintptr_t below = static_cast<std::uintptr_t>(-low) * sizeof(T);
  const std::uintptr_t above = static_cast<std::uintptr_t>(high + 1) * sizeof(T);
  return {below < at ? at - below : 0, above < last - at ? at + above : last};
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
  for (int i = 0; i < n; ++i) {
    if (axes[i].size == 0) return true;
    if (axes[i].stride < 0) axes[i].stride = -axes[i].stride;
  }
  index_t spanned = 1;
  for (int done = 0; done < n; ++done) {
    int least = done;
    for (int i = done; i < n; ++i)
      if (axes[i].stride < axes[least].stride) least = i;
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

}  // namespace checks
DIFFATTN_ISA_NAMESPACE_END
