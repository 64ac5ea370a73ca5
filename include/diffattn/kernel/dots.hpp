// SPDX-License-Identifier: MIT
#pragma once

// Scores of a few query rows: dot products with keys where they lie, in whatever type they are stored.
//
// There are too few query rows to fill the lanes of a register, so the channels lie in lanes, and the sums across lanes are
// taken for a whole register of results at once. A tile is Rows query rows × lanes / Rows keys: each key is read, and
// converted, once for all rows of the tile.

#include <utility>

#include "../simd/sum.hpp"
#include "rows.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// Keys of a tile that are worked on at a time: they share the loads of the queries. For one query row that is worth less than
/// reading memory in order (f32: 24 instead of 20 GB/s; bf16, int8: two keys are 5 % faster than one or four).
template <storage Type, int Rows, class T>
inline constexpr int group_keys = Rows > 1                   ? (simd::lanes<T> / Rows < 4 ? simd::lanes<T> / Rows : 4)
                                  : fetches_with_loads<Type> ? 1
                                                             : 2;

/// Products, not yet summed over the lanes, of Rows query rows with the keys from number First on. Part: d is no multiple of
/// the codec's step.
template <storage Type, int Rows, bool Part, int First, class T>
DIFFATTN_INLINE void dot_group(const T* q, index_t q_step, const unsigned char* const* row, index_t ahead, index_t d,
                               vec<T> (&acc)[simd::lanes<T>]) noexcept {
  using codec = simd::codec<Type, T>;
  constexpr int w = simd::lanes<T>, group = group_keys<Type, Rows, T>;
  vec<T> sum[Rows][group];
  DIFFATTN_UNROLL
  for (int r = 0; r < Rows; ++r) {
    DIFFATTN_UNROLL
    for (int j = 0; j < group; ++j) sum[r][j] = simd::broadcast(T(0));
  }
  const auto add = [&](index_t i, auto&& load) {
    vec<T> query[Rows][codec::vectors];
    DIFFATTN_UNROLL
    for (int r = 0; r < Rows; ++r) {
      DIFFATTN_UNROLL
      for (int u = 0; u < codec::vectors; ++u) query[r][u] = simd::load(q + r * q_step + i + u * w);
    }
    DIFFATTN_UNROLL
    for (int j = 0; j < group; ++j) {
      vec<T> key[codec::vectors];
      load(row[First + j], key);
      DIFFATTN_UNROLL
      for (int u = 0; u < codec::vectors; ++u) {
        DIFFATTN_UNROLL
        for (int r = 0; r < Rows; ++r) sum[r][j] = simd::fma<T>(key[u], query[r][u], sum[r][j]);
      }
    }
  };
  if constexpr (!fetches_with_loads<Type>) {
    DIFFATTN_UNROLL
    for (int j = 0; j < group; ++j) fetch_row(row[First + j] + ahead, row_bytes(Type, d));
  }
  index_t i = 0;
  for (; i + codec::step <= d; i += codec::step)
    add(i, [&](const unsigned char* key, auto& to) {
      if constexpr (fetches_with_loads<Type>) simd::prefetch_to_l2(key + ahead + i * static_cast<index_t>(sizeof(T)));
      codec::load(key, i, to);
    });
  if constexpr (Part) add(i, [&](const unsigned char* key, auto& to) { codec::load_part(key, i, d - i, to); });
  DIFFATTN_UNROLL
  for (int r = 0; r < Rows; ++r) {
    DIFFATTN_UNROLL
    for (int j = 0; j < group; ++j) acc[simd::sum_place<T>(r * (w / Rows) + First + j)] = sum[r][j];
  }
}

/// All groups of a tile. (A loop over them is beyond clang's unrolling at some levels.)
template <storage Type, int Rows, bool Part, class T, int... Groups>
DIFFATTN_INLINE void dot_groups(std::integer_sequence<int, Groups...>, const T* q, index_t q_step,
                                const unsigned char* const* row, index_t ahead, index_t d,
                                vec<T> (&acc)[simd::lanes<T>]) noexcept {
  (dot_group<Type, Rows, Part, Groups * group_keys<Type, Rows, T>>(q, q_step, row, ahead, d, acc), ...);
}

/// The products of Rows query rows with `count` <= lanes / Rows keys from `keys` on, `stride` bytes apart; those of row 0
/// first. q is padded with zeros. Past the end the last key stands in for those that are missing, so nothing beyond is read.
template <storage Type, int Rows, bool Part, class T>
DIFFATTN_INLINE vec<T> dot_tile(const T* q, index_t q_step, const unsigned char* keys, index_t stride, index_t count,
                                index_t ahead, const float* scales, index_t d) noexcept {
  using codec = simd::codec<Type, T>;
  constexpr int w = simd::lanes<T>, per_row = w / Rows;
  const unsigned char* row[per_row];
  row[0] = keys;
  DIFFATTN_UNROLL
  for (int j = 1; j < per_row; ++j) row[j] = row[j - 1] + (j < count ? stride : 0);
  vec<T> acc[w];
  dot_groups<Type, Rows, Part, T>(std::make_integer_sequence<int, per_row / group_keys<Type, Rows, T>>{}, q, q_step, row, ahead,
                                  d, acc);
  const vec<T> sums = simd::sum_lanes(acc);
  if (!codec::row_scale && !scales) return sums;
  T scale[w];
  DIFFATTN_UNROLL
  for (int j = 0; j < per_row; ++j) {
    const T s = codec::row_scale ? codec::scale(row[j]) : static_cast<T>(scales[j < count ? j : count - 1]);
    DIFFATTN_UNROLL
    for (int r = 0; r < Rows; ++r) scale[r * per_row + j] = s;
  }
  return sums * simd::load(scale);
}

/// x[row][key] = q[row] · k[key] for `rows` query rows and the keys of a run.
template <storage Type, class T>
DIFFATTN_NOINLINE void dots(const T* q, index_t q_step, index_t rows, const row_run& keys, index_t d, T* x,
                            index_t x_step) noexcept {
  index_t row = 0;
  const auto tiles = [&](auto size, auto part) {
    constexpr int n = decltype(size)::value, per_row = simd::lanes<T> / n;
    for (; row + n <= rows; row += n)
      for (index_t first = 0; first < keys.count; first += per_row) {
        const index_t count = keys.count - first;
        T result[simd::lanes<T>];
        simd::store(result, dot_tile<Type, n, decltype(part)::value>(q + row * q_step, q_step, keys.row(first), keys.stride,
                                                                     count, row == 0 ? keys.ahead : 0,
                                                                     keys.scales ? keys.scales + first : nullptr, d));
        for (int r = 0; r < n; ++r) {
          T* const to = x + (row + r) * x_step + first;
          if (count >= per_row)
            std::memcpy(to, result + r * per_row, per_row * sizeof(T));
          else
            std::memcpy(to, result + r * per_row, static_cast<std::size_t>(count) * sizeof(T));
        }
      }
  };
  const auto all = [&](auto part) {
    // Four rows need four lanes; rows of another type are unpacked before there are so many.
    if constexpr (Type == storage_of<T> && simd::lanes<T> >= 4) tiles(std::integral_constant<int, 4>{}, part);
    tiles(std::integral_constant<int, 2>{}, part);
    tiles(std::integral_constant<int, 1>{}, part);
  };
  if (d % simd::codec<Type, T>::step == 0)
    all(std::false_type{});
  else
    all(std::true_type{});
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
