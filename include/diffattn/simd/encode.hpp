// SPDX-License-Identifier: MIT
#pragma once

// Writing of stored rows (storage.hpp), 32 numbers at a time. These are loops of fixed length, which compilers vectorise; only
// binary16 needs an instruction. All targets write the same bytes.

#include <limits>

#include "codec.hpp"

// See batch.hpp.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace simd {

/// The numbers that are encoded at a time; a block of q6.
inline constexpr int encode_block = static_cast<int>(q6_block);

/// The nearest binary16, ties to even. Adding 1/2 to a number below 2^-14 rounds it to a multiple of 2^-24, the unit of
/// subnormal binary16, and leaves that multiple in the low bits of the sum.
DIFFATTN_INLINE std::uint16_t f16_of_float(float x) noexcept {
  constexpr std::uint32_t infinity = 255u << 23, bias = 112u << 23;
  const std::uint32_t bits = bits_of_float(x), magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t small = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
  const std::uint32_t normal = (magnitude - bias + 0xFFFu + (magnitude >> 13 & 1)) >> 13;
  const std::uint32_t special = 0x7C00u | (magnitude > infinity ? 0x200u | (magnitude >> 13 & 0x3FFu) : 0);
  const std::uint32_t h = magnitude < bias + (1u << 23) ? small : magnitude < 143u << 23 ? normal : special;
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | h);
}

/// The nearest bfloat16, ties to even.
DIFFATTN_INLINE std::uint16_t bf16_of_float(float x) noexcept {
  const std::uint32_t bits = bits_of_float(x);
  const std::uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 255u << 23 ? nan : rounded);
}

DIFFATTN_INLINE void encode_f16(const float* x, std::uint16_t* out) noexcept {
#if defined(__AVX512F__)
  for (int j = 0; j < encode_block; j += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + j), _mm512_cvtps_ph(load(x + j), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX__) && defined(__F16C__)
  for (int j = 0; j < encode_block; j += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), _mm256_cvtps_ph(load(x + j), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int j = 0; j < encode_block; ++j) out[j] = f16_of_float(x[j]);
#endif
}

DIFFATTN_INLINE void encode_bf16(const float* x, std::uint16_t* out) noexcept {
  for (int j = 0; j < encode_block; ++j) out[j] = bf16_of_float(x[j]);
}

/// The larger of `bound` and the largest magnitude, as bits: they are in the order of the magnitudes, with infinity and NaN
/// above all finite numbers.
DIFFATTN_INLINE std::int32_t largest_magnitude(const float* x, std::int32_t bound) noexcept {
  for (int j = 0; j < encode_block; ++j) {
    const auto magnitude = static_cast<std::int32_t>(bits_of_float(x[j]) & 0x7FFFFFFFu);
    bound = bound < magnitude ? magnitude : bound;
  }
  return bound;
}

/// The scale that makes the largest magnitude (as bits) the code `top`: NaN if it is not finite, 0 if the scale would be
/// subnormal.
DIFFATTN_INLINE float scale_of_largest(std::int32_t magnitude, float top) noexcept {
  if (magnitude >= 255 << 23) return float_of_bits(0x7FC00000u);
  const float largest = float_of_bits(static_cast<std::uint32_t>(magnitude));
  return largest < top * std::numeric_limits<float>::min() ? 0.0f : largest / top;
}

/// x / scale + offset to the nearest integer, ties to even, as bytes; only `offset` where the scale is 0 or NaN. Adding
/// 1.5 * 2^23 rounds and leaves the integer in the low bits of the sum. `offset` is even, so a tie goes where it would without.
/// No quotient is beyond ±top, but one by a rounded reciprocal may be, and upward rounding then takes it to the next code.
DIFFATTN_INLINE void encode_codes(const float* x, float scale, float top, int offset, unsigned char* code) noexcept {
  if (!(scale > 0)) {
    std::memset(code, offset, encode_block);
    return;
  }
  alignas(64) float sum[encode_block];
  const vec<float> divisor = broadcast(scale), round = broadcast(12582912.0f + static_cast<float>(offset));
  const vec<float> least = broadcast(-top);
  for (int j = 0; j < encode_block; j += lanes<float>)
    store<float>(sum + j, at_least<float>(least, -at_least<float>(least, -(load(x + j) / divisor))) + round);
  for (int j = 0; j < encode_block; ++j) code[j] = static_cast<unsigned char>(bits_of_float(sum[j]) & 0xFFu);
}

/// 32 numbers as a block of q6. The bits of eight codes at a time are moved as one word, whatever its byte order.
DIFFATTN_INLINE void encode_q6(const float* x, unsigned char* out) noexcept {
  constexpr std::uint64_t each = 0x0101010101010101u, four = 15 * each, two = 3 * each;
  const std::uint32_t quotient = bits_of_float(scale_of_largest(largest_magnitude(x, 0), 31));
  const std::uint32_t scale = (quotient + 0xFFFFu) >> 16;
  unsigned char code[encode_block];
  encode_codes(x, float_of_bits(scale << 16), 31, 32, code);
  std::uint64_t u[4];
  std::memcpy(u, code, sizeof u);
  const std::uint64_t packed[3] = {
      (u[0] & four) | (u[2] & four) << 4, (u[1] & four) | (u[3] & four) << 4,
      (u[0] >> 4 & two) | (u[1] >> 4 & two) << 2 | (u[2] >> 4 & two) << 4 | (u[3] >> 4 & two) << 6};
  std::memcpy(out, packed, sizeof packed);
  out[24] = static_cast<unsigned char>(scale & 0xFFu);
  out[25] = static_cast<unsigned char>(scale >> 8);
}

/// Stores a row. `read(i, n, block)` delivers its numbers i … i + n - 1 (n <= 32, i a multiple of 32), of type T, and may be
/// asked for the same ones twice. T is double for f64 and float for the others.
template <class T, class Read>
void encode_row(storage type, index_t width, Read&& read, unsigned char* row) noexcept {
  alignas(64) T x[encode_block];
  // The count of a full block is a constant of its type, so that nothing of it is copied by a call.
  const auto each_block = [&](auto&& encode) {
    index_t i = 0;
    for (; i + encode_block <= width; i += encode_block) {
      read(i, index_t(encode_block), x);
      encode(i, std::integral_constant<std::size_t, encode_block>());
    }
    if (i == width) return;
    for (index_t j = width - i; j < encode_block; ++j) x[j] = 0;
    read(i, width - i, x);
    encode(i, static_cast<std::size_t>(width - i));
  };
  if constexpr (std::is_same_v<T, double>) {
    static_cast<void>(type);
    each_block([&](index_t i, auto n) { std::memcpy(row + 8 * i, x, 8 * n); });
  } else {
    std::uint16_t half[encode_block];
    unsigned char code[encode_block];
    std::int32_t largest = 0;
    float scale;
    switch (type) {
      case storage::f64: break;
      case storage::f32: each_block([&](index_t i, auto n) { std::memcpy(row + 4 * i, x, 4 * n); }); break;
      case storage::f16:
        each_block([&](index_t i, auto n) { encode_f16(x, half), std::memcpy(row + 2 * i, half, 2 * n); });
        break;
      case storage::bf16:
        each_block([&](index_t i, auto n) { encode_bf16(x, half), std::memcpy(row + 2 * i, half, 2 * n); });
        break;
      case storage::int8:
        each_block([&](index_t, auto) { largest = largest_magnitude(x, largest); });
        scale = scale_of_largest(largest, 127);
        std::memcpy(row, &scale, sizeof scale);
        each_block([&](index_t i, auto n) { encode_codes(x, scale, 127, 0, code), std::memcpy(row + 4 + i, code, n); });
        break;
      case storage::q6: each_block([&](index_t i, auto) { encode_q6(x, row + i / q6_block * q6_block_bytes); }); break;
    }
  }
}

}  // namespace simd
DIFFATTN_ISA_NAMESPACE_END

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
