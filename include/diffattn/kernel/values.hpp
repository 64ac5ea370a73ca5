// SPDX-License-Identifier: MIT
#pragma once

// The second product: packed values, and weights · V for one group of queries.

#include <cstring>
#include <limits>

#include "tile.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// Distance of two panels of a chunk: one cache line more than the panel, so that the panels of wide values do not share a few
/// cache sets.
template <class T>
inline constexpr index_t panel_step = chunk_keys* panel_channels + static_cast<index_t>(64 / sizeof(T));

/// Elements of one packed chunk: [panel][key][channel of the panel].
template <class T>
constexpr index_t packed_chunk_size(index_t dv) noexcept {
  return (dv + panel_channels - 1) / panel_channels * panel_step<T>;
}

/// Looks for numbers that are not finite. By comparison: x * 0 is folded to 0 by clang's -fassociative-math, which nothing
/// announces.
template <class T>
class poison {
 public:
  DIFFATTN_INLINE void add(const T* x, index_t n) noexcept {
    constexpr index_t w = simd::lanes<T>;
    index_t i = 0;
    for (; i + w <= n; i += w) finite_ = finite_ & (simd::abs<T>(simd::load(x + i)) <= simd::broadcast(most));
    for (; i < n; ++i) rest_ = rest_ && x[i] <= most && x[i] >= -most;
  }
  DIFFATTN_INLINE bool none() const noexcept { return rest_ && simd::all<T>(finite_); }

 private:
  static constexpr T most = std::numeric_limits<T>::max();
  simd::mask<T> finite_ = simd::broadcast(T(0)) == simd::broadcast(T(0));
  bool rest_ = true;
};

/// Copies `width` channels of `keys` consecutive keys to channel `to` of a packed chunk; `packed` is at the first of these
/// keys.
template <class T>
DIFFATTN_INLINE void pack_channels(const T* head, index_t v_stride, index_t width, index_t keys, index_t to,
                                   T* packed) noexcept {
  index_t c = 0;
  if (to % panel_channels == 0)
    for (T* panel = packed + to / panel_channels * panel_step<T>; c + panel_channels <= width;
         c += panel_channels, panel += panel_step<T>)
      for (index_t key = 0; key < keys; ++key)
        std::memcpy(panel + key * panel_channels, head + key * v_stride + c, panel_channels * sizeof(T));
  for (; c < width; ++c)
    for (index_t key = 0; key < keys; ++key)
      packed[(to + c) / panel_channels * panel_step<T> + key * panel_channels + (to + c) % panel_channels] =
          head[key * v_stride + c];
}

/// Copies keys [begin, end) of one chunk (relative to the chunk) of a value into packed order: `heads` value heads of `width`
/// channels, one after the other. `rows(head, key, count)` gives `count` rows of a head from `key` on, as a pointer and a
/// stride. Rows of a wide value are a power of two apart and would share a few cache sets; packed, a value tile reads one
/// sequential stream. Channels that fill the last panel are zero. Returns whether all values are finite.
template <class T, class Rows>
DIFFATTN_INLINE bool pack_values(int heads, index_t width, index_t begin, index_t end, Rows&& rows, T* packed) noexcept {
  constexpr index_t keys = 4;  // fill a cache line of each panel (float)
  poison<T> seen;
  for (index_t key = begin; key < end; key += keys) {
    const index_t count = key + keys < end ? keys : end - key;
    T* const to = packed + key * panel_channels;
    for (int head = 0; head < heads; ++head) {
      const auto [from, stride] = rows(head, key, count);
      for (index_t i = 0; i < count; ++i) seen.add(from + i * stride, width);
      if (count == keys)
        pack_channels(from, stride, width, keys, head * width, to);
      else
        pack_channels(from, stride, width, count, head * width, to);
    }
    for (index_t c = heads * width; c % panel_channels != 0; ++c)
      for (index_t i = 0; i < count; ++i)
        to[c / panel_channels * panel_step<T> + i * panel_channels + c % panel_channels] = T(0);
  }
  return seen.none();
}

/// Rows of a tensor for `pack_values`.
template <class T>
struct strided_rows {
  const T* data;
  index_t stride;
};

/// out[channel][lane] += Σ_key weight[key][lane] · value[key][channel] for Panels panels of a chunk, `count` keys. The sum of a
/// chunk is formed by itself: the rounding error then grows with chunk_keys + chunks, not with the number of keys.
/// With Hidden, a lane skips the keys that it may not see, where 0 · NaN would not be 0: those whose hidden[key][lane] is not
/// 0.
template <int Vectors, int Panels, bool Hidden, class T>
DIFFATTN_NOINLINE void value_tile(const T* weights, const T* values, index_t count, const T* hidden, T* out) noexcept {
  constexpr int w = simd::lanes<T>, channels = panel_channels * Panels;
  vec<T> acc[channels][Vectors];
  DIFFATTN_UNROLL
  for (int c = 0; c < channels; ++c) {
    DIFFATTN_UNROLL
    for (int v = 0; v < Vectors; ++v) acc[c][v] = simd::broadcast(T(0));
  }
  for (index_t j = 0; j < count; ++j) {
    vec<T> weight[Vectors];
    DIFFATTN_UNROLL
    for (int v = 0; v < Vectors; ++v) weight[v] = simd::load_pinned(weights + (j * Vectors + v) * w);
    DIFFATTN_UNROLL
    for (int c = 0; c < channels; ++c) {
      const vec<T> value =
          simd::broadcast(values[c / panel_channels * panel_step<T> + j * panel_channels + c % panel_channels]);
      DIFFATTN_UNROLL
      for (int v = 0; v < Vectors; ++v) {
        const vec<T> sum = simd::fma<T>(weight[v], value, acc[c][v]);
        if constexpr (Hidden) {
          const auto seen = simd::load(hidden + (j * Vectors + v) * w) == simd::broadcast(T(0));
          acc[c][v] = simd::select<T>(seen, sum, acc[c][v]);
        } else {
          acc[c][v] = sum;
        }
      }
    }
  }
  DIFFATTN_UNROLL
  for (int c = 0; c < channels; ++c) {
    DIFFATTN_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      T* const p = out + (c * Vectors + v) * w;
      simd::store(p, simd::load(p) + acc[c][v]);
    }
  }
}

/// combined[key][lane] = c1[lane] · p1[key][lane] - c2[lane] · p2[key][lane]. One of the coefficients is 1 (see
/// `mix_coefficients`), so that equal weights cancel exactly in spite of the fused rounding.
template <int Vectors, class T>
DIFFATTN_NOINLINE void combine(const T* p1, const T* p2, const T* c1, const T* c2, index_t count, T* combined) noexcept {
  constexpr int w = simd::lanes<T>;
  vec<T> a[Vectors], b[Vectors];
  DIFFATTN_UNROLL
  for (int v = 0; v < Vectors; ++v) a[v] = simd::load(c1 + v * w), b[v] = simd::load(c2 + v * w);
  for (index_t j = 0; j < count; ++j) {
    DIFFATTN_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      const index_t i = (j * Vectors + v) * w;
      simd::store(combined + i, simd::fnma<T>(b[v], simd::load(p2 + i), a[v] * simd::load(p1 + i)));
    }
  }
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
