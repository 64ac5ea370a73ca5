// SPDX-License-Identifier: MIT
#pragma once

// Rows of numbers where they lie, in whatever type they are stored.

#include "../simd/encode.hpp"
#include "tile.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

/// Elements between two rows in scratch memory: whole steps of every codec.
constexpr index_t padded_row(index_t width) noexcept {
  return round_up(width, q6_block);
}

/// `count` rows, `stride` bytes apart. (Not a list of pointers: with addresses that are loaded the hardware reads ahead less,
/// 18 GB/s instead of 25.)
struct row_run {
  const unsigned char* data;
  index_t stride;
  index_t count;
  /// Distance in bytes from a row to the one that is fetched while it is used (27 GB/s). It need not exist.
  index_t ahead = 0;
  /// Scales of the rows where they have been taken out of them; null: 1.
  const float* scales = nullptr;

  DIFFATTN_INLINE const unsigned char* row(index_t i) const noexcept { return data + i * stride; }
  DIFFATTN_INLINE row_run part(index_t first, index_t rows) const noexcept {
    return {row(first), stride, rows, ahead, scales ? scales + first : nullptr};
  }
};

/// Brings a row near. Rows of whole cache lines need it with each load only, which costs no loop of its own.
DIFFATTN_INLINE void fetch_row(const unsigned char* row, index_t bytes) noexcept {
  for (index_t e = 0; e < bytes; e += 64) simd::prefetch_to_l2(row + e);
}
template <storage Type>
inline constexpr bool fetches_with_loads = Type == storage::f32 || Type == storage::f64;

/// Rows that are unpacked at a time: those of a score tile.
inline constexpr index_t unpacked_rows = 16;

/// The numbers of a row without its scale, in whole registers: `to` is padded.
template <storage Type, class T>
DIFFATTN_INLINE void unpack_row(const unsigned char* row, index_t width, T* to) noexcept {
  using codec = simd::codec<Type, T>;
  vec<T> x[codec::vectors];
  const auto put = [&](index_t i) {
    DIFFATTN_UNROLL
    for (int u = 0; u < codec::vectors; ++u) simd::store(to + i + u * simd::lanes<T>, x[u]);
  };
  index_t i = 0;
  for (; i + codec::step <= width; i += codec::step) codec::load(row, i, x), put(i);
  if (i < width) codec::load_part(row, i, width - i, x), put(i);
}

/// f(type, run, first) with the storage type as a constant, for the whole run or, one call after the other, for its rows
/// from `first` on. Query rows come in tiles of two; with more of them each row would be unpacked again, so then it is
/// unpacked once, to `wide` (room for unpacked_rows). The results are the same, bit for bit.
template <class T, class F>
DIFFATTN_INLINE void with_rows(storage type, const row_run& run, index_t width, index_t query_rows, T* wide, F&& f) noexcept {
  simd::with_storage<T>(type, [&](auto t) {
    using codec = simd::codec<t(), T>;
    if (t() == storage_of<T> || query_rows <= 2) return f(t, run, index_t{0});
    constexpr index_t most = unpacked_rows;
    const index_t step = padded_row(width);
    for (index_t first = 0; first < run.count; first += most) {
      row_run some{reinterpret_cast<const unsigned char*>(wide), step * static_cast<index_t>(sizeof(T)),
                   run.count - first < most ? run.count - first : most};
      float scales[most];
      for (index_t i = 0; i < some.count; ++i) {
        const unsigned char* const row = run.row(first + i);
        fetch_row(row + run.ahead, row_bytes(t(), width));
        unpack_row<t()>(row, width, wide + i * step);
        scales[i] = static_cast<float>(codec::scale(row));
      }
      if (codec::row_scale) some.scales = scales;
      f(std::integral_constant<storage, storage_of<T>>{}, some, first);
    }
  });
}

/// A row of a tensor as numbers to compute with, and back (one rounding).
template <class T>
DIFFATTN_INLINE void read_row(const T* row, index_t width, compute_type<T>* to) noexcept {
  if constexpr (std::is_same_v<T, compute_type<T>>)
    std::memcpy(to, row, static_cast<std::size_t>(width) * sizeof(T));
  else
    simd::decode_row_as<storage_of<T>>(reinterpret_cast<const unsigned char*>(row), width, to);
}
template <class T>
DIFFATTN_INLINE void write_row(const compute_type<T>* from, index_t width, T* row) noexcept {
  if constexpr (std::is_same_v<T, compute_type<T>>)
    std::memcpy(row, from, static_cast<std::size_t>(width) * sizeof(T));
  else
    simd::encode_row<compute_type<T>>(
        storage_of<T>, width,
        [from](index_t i, index_t n, compute_type<T>* block) {
          for (index_t j = 0; j < n; ++j) block[j] = from[i + j];
        },
        reinterpret_cast<unsigned char*>(row));
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
