// SPDX-License-Identifier: MIT
#pragma once

// Shapes shared by all kernels.
//
// The queries of a group lie in SIMD lanes: a group is `Vectors` registers of queries, and everything a row needs (its
// maximum, its sum, its λ, the norm of its output) is one lane of a register, so no kernel ever reduces across lanes. Keys and
// value channels are broadcast. A register tile is Vectors × (8 / Vectors) accumulators: multiply-add takes 4 cycles and 2
// start in each, which needs 8 of them, and 8 accumulators, 2 vectors and 1 broadcast fit the 16 registers of AVX2.

#include "../simd/batch.hpp"
#include "../tensor.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace kernel {

using simd::vec;

/// Queries of a group.
template <class T, int Vectors>
inline constexpr index_t group_lanes = Vectors* simd::lanes<T>;

/// Up to here the weights of a block (256 bytes a key) stay in a 512 KiB L2 by themselves.
inline constexpr index_t cached_keys = 2048;

/// Registers of a group with `rows` rows that sees `keys` keys. Two, so that a broadcast serves two multiply-adds, if there are
/// rows for them. AVX-512 keeps its units busy with one and then wastes less under the diagonal of a causal mask (n = 1024: 2
/// %), but beyond the L2 twice as many streams of weights cost more (n = 16384: 20 %). The result is the same, bit for bit.
template <class T>
constexpr int group_vectors(index_t rows, index_t keys) noexcept {
  return rows <= simd::lanes<T> || (simd::lanes<float> >= 16 && keys <= cached_keys) ? 1 : 2;
}

/// Keys of a score tile.
template <int Vectors>
inline constexpr int tile_keys = 8 / Vectors;

/// Value channels of a panel of packed values; a value tile takes 8 / (4 * Vectors) panels.
inline constexpr int panel_channels = 4;

/// Keys between two looks at the running maximum: the block's scores (32 keys × 128 bytes) stay in L1 with two tiles of keys.
inline constexpr index_t softmax_keys = 32;

/// Keys of a chunk of packed values: 128 keys × 4 channels are 2 KiB of sequential reads for each value tile, and the chunk's
/// combined weights (128 × 128 bytes) half of a 32 KiB L1.
inline constexpr index_t chunk_keys = 128;

/// Chunks whose sums are added up by themselves (2048 keys): 65536 keys make sums of 128, 16 and 32 terms instead of 128 and
/// 512.
inline constexpr index_t span_chunks = 16;

/// Queries of a block at most. Its groups share every softmax block of keys while it is in L1 and each chunk of values while it
/// is in L2.
inline constexpr index_t max_block_rows = 64;

/// Queries of a block, given the bytes of keys and values that each block reads. 32 rows keep the weights (256 bytes a key for
/// two maps) near; where keys and values do not stay in the last cache level, 64 read them half as often (d = 128, n = 16384:
/// 27 % faster; 3 % slower at n = 4096).
constexpr index_t block_rows(index_t bytes) noexcept {
  return bytes < (index_t{16} << 20) ? 32 : max_block_rows;
}

/// The visible keys of each lane, relative to the first key at hand; what partly visible keys need.
template <class T, int Vectors>
struct visible_lanes {
  T begin[group_lanes<T, Vectors>];
  T end[group_lanes<T, Vectors>];
};

constexpr index_t round_up(index_t n, index_t multiple) noexcept {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace kernel
DIFFATTN_ISA_NAMESPACE_END
