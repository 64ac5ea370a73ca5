// SPDX-License-Identifier: MIT
#pragma once

// Where the data lies: non-owning views with 64-bit strides. Grouped-query attention, shared heads and both common layouts
// are only strides; nothing is ever copied to fit a kernel.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "config.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// Every size, stride and index: signed 64-bit, since head * token * width overflows 32 bits in real models.
using index_t = std::int64_t;

/// A tensor [batch, tokens, heads, width]; strides count elements. The channels of one head must be contiguous
/// (width_stride 1); every other stride is free, also 0 (shared) for inputs. Trivially copyable, owns nothing.
template <class T>
struct tensor_view {
  T* data = nullptr;
  index_t batch = 0, tokens = 0, heads = 0, width = 0;
  index_t batch_stride = 0, token_stride = 0, head_stride = 0;
  index_t width_stride = 1;

  /// The first channel of one head of one token.
  DIFFATTN_INLINE T* at(index_t b, index_t t, index_t h) const noexcept {
    // An empty tensor may be null, and an offset from null is undefined.
    return data ? data + (b * batch_stride + t * token_stride + h * head_stride) : nullptr;
  }

  /// Tokens first … first + count - 1 of every batch entry.
  DIFFATTN_INLINE tensor_view token_range(index_t first, index_t count) const noexcept {
    tensor_view part = *this;
    part.data = at(0, first, 0), part.tokens = count;
    return part;
  }

  /// A view of mutable data is a view of constant data.
  template <class U = T, std::enable_if_t<!std::is_const_v<U>, int> = 0>
  DIFFATTN_INLINE operator tensor_view<const U>() const noexcept {
    return {data, batch, tokens, heads, width, batch_stride, token_stride, head_stride, width_stride};
  }
};

/// One number for each token and head, [batch, tokens, heads], with free strides (0 broadcasts): log-sum-exps and λ.
template <class T>
struct token_head_view {
  T* data = nullptr;
  index_t batch_stride = 0, token_stride = 0, head_stride = 0;

  DIFFATTN_INLINE T& at(index_t b, index_t t, index_t h) const noexcept {
    return data[b * batch_stride + t * token_stride + h * head_stride];
  }
};

/// Order of the axes in memory, outermost first: batch, tokens, heads, width — or heads before tokens.
enum class layout { bthd, bhtd };

/// A contiguous tensor that somebody owns. The sizes are always given as batch, tokens, heads, width; `order` says how
/// they lie in memory.
template <class T>
DIFFATTN_INLINE tensor_view<T> view(T* data, index_t batch, index_t tokens, index_t heads, index_t width,
                                    layout order = layout::bthd) noexcept {
  const index_t token_stride = order == layout::bthd ? heads * width : width;
  const index_t head_stride = order == layout::bthd ? width : tokens * width;
  return {data, batch, tokens, heads, width, tokens * heads * width, token_stride, head_stride, 1};
}

DIFFATTN_NAMESPACE_END
