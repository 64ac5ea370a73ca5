// SPDX-License-Identifier: MIT
#pragma once

// The second product for a few query rows: weighted sums of values where they lie, in whatever type they are stored. The
// channels lie in lanes; each value is read, and converted, once for all rows of a tile. The values of a row are added in
// the order of the keys, whatever the size of a tile.

#include "rows.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// out[row][channel] += Σ_key weight[row][key] · v[key][channel] for Rows rows, the keys of a run and Steps steps of channels
/// from `channel` on; with Part one step, of which only the channels below `width` exist.
template <storage Type, int Rows, int Steps, bool Part, class T>
DIFFATTN_INLINE void sum_tile(const T* weights, index_t w_step, const row_run& values, index_t channel, index_t width, T* out,
                              index_t out_step) noexcept {
  using codec = simd::codec<Type, T>;
  constexpr int w = simd::lanes<T>, vectors = codec::vectors;
  vec<T> acc[Rows][Steps * vectors];
  DIFFATTN_UNROLL
  for (int r = 0; r < Rows; ++r) {
    DIFFATTN_UNROLL
    for (int c = 0; c < Steps * vectors; ++c) acc[r][c] = simd::load(out + r * out_step + channel + c * w);
  }
  for (index_t j = 0; j < values.count; ++j) {
    const unsigned char* const row = values.row(j);
    if constexpr (!fetches_with_loads<Type>)
      if (channel == 0) fetch_row(row + values.ahead, row_bytes(Type, width));
    const bool scaled = codec::row_scale || values.scales;
    const T scale = codec::row_scale ? codec::scale(row) : values.scales ? static_cast<T>(values.scales[j]) : T(1);
    vec<T> weight[Rows];
    DIFFATTN_UNROLL
    for (int r = 0; r < Rows; ++r)
      weight[r] = simd::broadcast(scaled ? weights[r * w_step + j] * scale : weights[r * w_step + j]);
    DIFFATTN_UNROLL
    for (int s = 0; s < Steps; ++s) {
      vec<T> value[vectors];
      if constexpr (Part)
        codec::load_part(row, channel, width - channel, value);
      else
        codec::load(row, channel + s * codec::step, value);
      if constexpr (fetches_with_loads<Type>)
        simd::prefetch_to_l2(row + values.ahead + (channel + s * codec::step) * static_cast<index_t>(sizeof(T)));
      DIFFATTN_UNROLL
      for (int u = 0; u < vectors; ++u) {
        DIFFATTN_UNROLL
        for (int r = 0; r < Rows; ++r) acc[r][s * vectors + u] = simd::fma<T>(weight[r], value[u], acc[r][s * vectors + u]);
      }
    }
  }
  DIFFATTN_UNROLL
  for (int r = 0; r < Rows; ++r) {
    DIFFATTN_UNROLL
    for (int c = 0; c < Steps * vectors; ++c) simd::store(out + r * out_step + channel + c * w, acc[r][c]);
  }
}

/// Keys whose values are added to all rows and channels before the next ones are read. A tile takes a few rows and channels, so
/// that others would otherwise come from memory once more, and in pieces; 8 KB of values (512 bytes each) stay in L1 meanwhile.
inline constexpr index_t sum_keys = 16;

/// out[row][channel] += Σ_key weight[row][key] · v[key][channel] for `rows` rows and the keys of a run. Rows of `out` are
/// padded to whole steps.
template <storage Type, class T>
DIFFATTN_NOINLINE void weighted_sums(const T* weights, index_t w_step, index_t rows, const row_run& values, index_t width,
                                     T* out, index_t out_step) noexcept {
  using codec = simd::codec<Type, T>;
  // Accumulators: half of the registers there are; the rest hold weights and values.
  constexpr int registers = simd::lanes<float> >= 16 ? 16 : 8;
  const auto add = [&](const T* w, const row_run& some) {
    index_t row = 0;
    const auto tiles = [&](auto size) {
      constexpr int n = decltype(size)::value, most = registers / n / codec::vectors, wide = most < 1 ? 1 : most;
      for (; row + n <= rows; row += n) {
        const T* const from = w + row * w_step;
        T* const to = out + row * out_step;
        index_t c = 0;
        const auto steps = [&](auto of) {
          constexpr int m = decltype(of)::value;
          for (; c + m * codec::step <= width; c += m * codec::step)
            sum_tile<Type, n, m, false>(from, w_step, some, c, width, to, out_step);
        };
        steps(std::integral_constant<int, wide>{});
        if constexpr (wide >= 4) steps(std::integral_constant<int, wide / 2>{});
        if constexpr (wide >= 8) steps(std::integral_constant<int, wide / 4>{});
        if constexpr (wide >= 2) steps(std::integral_constant<int, 1>{});
        if (c < width) sum_tile<Type, n, 1, true>(from, w_step, some, c, width, to, out_step);
      }
    };
    if constexpr (Type == storage_of<T>) tiles(std::integral_constant<int, 4>{});
    tiles(std::integral_constant<int, 2>{});
    tiles(std::integral_constant<int, 1>{});
  };
  const bool one_tile = rows == 1 && width <= registers / codec::vectors * codec::step;
  const index_t visit = one_tile ? values.count : sum_keys;
  for (index_t at = 0; at < values.count; at += visit)
    add(weights + at, values.part(at, values.count - at < visit ? values.count - at : visit));
}

/// combined[key] = c1 · p1[key] - c2 · p2[key] for keys [begin, end); without p2, c1 · p1[key]. One of the coefficients is a
/// power of two (see `mix` and `merge_parts`), so equal weights cancel exactly in spite of the fused rounding. Whole registers.
template <class T>
DIFFATTN_INLINE void combine_row(const T* p1, const T* p2, T c1, T c2, index_t begin, index_t end, T* combined) noexcept {
  constexpr int w = simd::lanes<T>;
  const vec<T> a = simd::broadcast(c1), b = simd::broadcast(c2);
  for (index_t j = begin / w * w; j < end; j += w) {
    const vec<T> first = a * simd::load(p1 + j);
    simd::store(combined + j, p2 ? simd::fnma<T>(b, simd::load(p2 + j), first) : first);
  }
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
