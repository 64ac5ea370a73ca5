// SPDX-License-Identifier: MIT
#pragma once

// How numbers lie in memory: the element types of tensors and the row formats of caches. A row is one head of one token.
//
//   storage   bytes of a row of `width` numbers     one number
//   f64       8 width                               a double (only for calls in double)
//   f32       4 width                               a float
//   f16       2 width                               IEEE binary16
//   bf16      2 width                               the upper half of a float
//   int8      4 + width                             code · scale; the row begins with its scale, a float
//   q6        26 ceil(width / 32)                   code · scale; see below
//
// int8: scale = max|x| / 127, code = x / scale to the nearest integer, ties to even, a signed byte. All quotients are floats.
//
// q6: blocks of 32 numbers, 26 bytes each; the last block of a row is filled up with zeros. scale = max|x| / 31 of the block,
// rounded up to bf16; code = x / scale to the nearest integer, ties to even, stored as u = code + 32, 1 … 63.
//   bytes 0 – 15   byte i, bits 0–3: bits 0–3 of u[i];  bits 4–7: bits 0–3 of u[i + 16]
//   bytes 16 – 23  byte i, bits 0–1: bits 4–5 of u[i];  bits 2–3: of u[i + 8];  4–5: of u[i + 16];  6–7: of u[i + 24]
//   bytes 24 – 25  the scale, bf16, low byte first
//
// In both, a row (block) that holds a NaN or an infinity has scale NaN and reads back as NaN; one with max|x| below 127 (31)
// FLT_MIN has scale 0 and reads back as zeros. The codes of both are 0. Other multi-byte numbers are in the byte order of the
// machine.
//
// Error of a number x that is stored and read back: f16 |x| 2^-11 + 2^-25 (|x| < 65520; else ±infinity), bf16 |x| 2^-8 +
// 2^-134, int8 max|x| / 253.9 of the row (254 but for the roundings of float), q6 max|x| / 61.5 of the block (half a scale:
// 62, and 1 + 2^-7 for rounding it up). With scale 0 it is |x|. Beyond 3.37e38 these three may give back ±infinity.

#include <cstring>

#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

enum class storage { f64, f32, f16, bf16, int8, q6 };

/// IEEE binary16, as bits. Eigen::half and _Float16 have the same layout.
struct f16 {
  std::uint16_t bits = 0;
};
/// bfloat16, as bits. Eigen::bfloat16 has the same layout.
struct bf16 {
  std::uint16_t bits = 0;
};

/// The storage of an element type.
template <class T>
inline constexpr storage storage_of = std::is_same_v<T, double>  ? storage::f64
                                      : std::is_same_v<T, float> ? storage::f32
                                      : std::is_same_v<T, f16>   ? storage::f16
                                                                 : storage::bf16;

/// Can a tensor have this element type?
template <class T>
inline constexpr bool is_element =
    std::is_same_v<T, double> || std::is_same_v<T, float> || std::is_same_v<T, f16> || std::is_same_v<T, bf16>;

/// The type in which a call on tensors of T computes: float for the 16-bit types.
template <class T>
using compute_type = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Numbers of a q6 block and its bytes.
inline constexpr index_t q6_block = 32, q6_block_bytes = 26;

/// Bytes of one row of `width` numbers.
DIFFATTN_INLINE constexpr index_t row_bytes(storage type, index_t width) noexcept {
  switch (type) {
    case storage::f64: return 8 * width;
    case storage::f32: return 4 * width;
    case storage::f16:
    case storage::bf16: return 2 * width;
    case storage::int8: return 4 + width;
    case storage::q6: return (width + q6_block - 1) / q6_block * q6_block_bytes;
  }
  return 0;
}

DIFFATTN_NAMESPACE_END
