// SPDX-License-Identifier: MIT
#pragma once

// Reading of stored rows (storage.hpp) into registers, fast enough to stand in front of every multiply-add.
//
// A format is a function from bytes to the numbers of one register, `widen`. It exists up to three times: for AVX-512, for
// AVX2, and as a plain loop, which compilers vectorise for the others. All give the same bits.

#include "../storage.hpp"
#include "batch.hpp"

// See batch.hpp.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace simd {

/// The float with these bits.
DIFFATTN_INLINE float float_of_bits(std::uint32_t bits) noexcept {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
DIFFATTN_INLINE std::uint32_t bits_of_float(float x) noexcept {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

/// A binary16 as a float; NaNs become quiet, as in hardware. Subnormal numbers are normalised by a subtraction of normal ones,
/// which no flushing of subnormals disturbs.
DIFFATTN_INLINE float float_of_f16(std::uint16_t h) noexcept {
  constexpr std::uint32_t exponent = 0x1Fu << 23, bias = 112u << 23, one = 1u << 23, quiet = 1u << 22;
  const std::uint32_t shifted = (h & 0x7FFFu) << 13, sign = (h & 0x8000u) << 16;
  const std::uint32_t normal = shifted + bias;
  const std::uint32_t small = bits_of_float(float_of_bits(normal + one) - float_of_bits(bias + one));
  const std::uint32_t special = (normal + bias) | (shifted > exponent ? quiet : 0);
  const std::uint32_t magnitude = shifted < one ? small : shifted < exponent ? normal : special;
  return float_of_bits(sign | magnitude);
}

/// The numbers of one register by a plain loop over stored numbers of type Stored.
template <class Stored, class Convert>
DIFFATTN_INLINE vec<float> widen_each(const unsigned char* p, Convert convert) noexcept {
  Stored stored[lanes<float>];
  alignas(64) float x[lanes<float>];
  std::memcpy(stored, p, sizeof stored);
  for (int j = 0; j < lanes<float>; ++j) x[j] = convert(stored[j]);
  return load(x);
}

/// The numbers of one register from their bytes at any address.
template <storage S>
DIFFATTN_INLINE auto widen(const unsigned char* p) noexcept {
  if constexpr (S == storage::f64) {
    return load(reinterpret_cast<const double*>(p));
  } else if constexpr (S == storage::f32) {
    return load(reinterpret_cast<const float*>(p));
  } else if constexpr (S == storage::f16) {
#if defined(__AVX512F__)
    return vec<float>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX__) && defined(__F16C__)
    return vec<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    return widen_each<std::uint16_t>(p, [](std::uint16_t h) { return float_of_f16(h); });
#endif
  } else if constexpr (S == storage::bf16) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return vec<float>(_mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
#elif defined(__AVX2__)
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return vec<float>(_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)));
#else
    return widen_each<std::uint16_t>(p, [](std::uint16_t b) { return float_of_bits(std::uint32_t(b) << 16); });
#endif
  } else {
    static_assert(S == storage::int8);
#if defined(__AVX512F__)
    const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return vec<float>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(code)));
#elif defined(__AVX2__)
    const __m128i code = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return vec<float>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code)));
#else
    return widen_each<signed char>(p, [](signed char code) { return static_cast<float>(code); });
#endif
  }
}

/// The first `count` bytes at p and zeros after them, as many as a register has; reads nothing else.
struct padded_bytes {
  alignas(64) unsigned char bytes[64];

  DIFFATTN_INLINE padded_bytes(const unsigned char* p, index_t count) noexcept {
#if defined(__AVX512BW__)
    _mm512_store_si512(bytes, _mm512_maskz_loadu_epi8((std::uint64_t(1) << count) - 1, p));
#else
    std::memset(bytes, 0, sizeof bytes);
    std::memcpy(bytes, p, static_cast<std::size_t>(count));
#endif
  }
};

/// x with its lanes from `count` on cleared.
DIFFATTN_INLINE vec<float> first_lanes(vec<float> x, index_t count) noexcept {
  alignas(64) static constexpr float number[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return select<float>(load(number) < broadcast(static_cast<float>(count)), x, broadcast(0.0f));
}

/// Reads the rows of a format, `step` numbers at a time into `vectors` registers. T is double for f64 and float for the others.
template <storage S, class T>
struct codec {
  static_assert(std::is_same_v<T, std::conditional_t<S == storage::f64, double, float>>);

  static constexpr int vectors = 1;
  static constexpr index_t step = lanes<T>;
  /// Are the loaded numbers codes, to be multiplied by the scale of the row?
  static constexpr bool row_scale = S == storage::int8;

  static DIFFATTN_INLINE T scale(const unsigned char* row) noexcept {
    T s = 1;
    if constexpr (row_scale) std::memcpy(&s, row, sizeof s);
    return s;
  }

  /// Numbers i … i + step - 1; i is a multiple of step.
  static DIFFATTN_INLINE void load(const unsigned char* row, index_t i, vec<T> (&x)[vectors]) noexcept {
    x[0] = widen<S>(row + header + bytes * i);
  }

  /// Numbers i … i + count - 1 (count < step), then zeros; reads nothing beyond the row.
  static DIFFATTN_INLINE void load_part(const unsigned char* row, index_t i, index_t count, vec<T> (&x)[vectors]) noexcept {
    x[0] = widen<S>(padded_bytes(row + header + bytes * i, bytes * count).bytes);
  }

 private:
  static constexpr index_t header = row_scale ? 4 : 0, bytes = row_bytes(S, 1) - header;
};

template <>
struct codec<storage::q6, float> {
  static constexpr int vectors = static_cast<int>(q6_block) / lanes<float>;
  static constexpr index_t step = q6_block;
  static constexpr bool row_scale = false;
  static_assert(vectors * lanes<float> == step);

  static DIFFATTN_INLINE float scale(const unsigned char*) noexcept { return 1; }

  static DIFFATTN_INLINE void load(const unsigned char* row, index_t i, vec<float> (&x)[vectors]) noexcept {
    const unsigned char* const p = row + i / q6_block * q6_block_bytes;
#if defined(__AVX2__)
    // The upper half of bytes 22 – 25 is the scale.
    std::int32_t scale_bits;
    std::memcpy(&scale_bits, p + 22, sizeof scale_bits);
    const __m256i code = codes(p);
    const __m128i half[2] = {_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1)};
#if defined(__AVX512F__)
    const __m512 s = _mm512_castsi512_ps(_mm512_and_si512(_mm512_set1_epi32(scale_bits), _mm512_set1_epi32(-65536)));
    for (int j = 0; j < 2; ++j) x[j] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(half[j])), s);
#else
    const __m256 s = _mm256_castsi256_ps(_mm256_and_si256(_mm256_set1_epi32(scale_bits), _mm256_set1_epi32(-65536)));
    for (int j = 0; j < 4; ++j) {
      const __m128i quarter = j % 2 ? _mm_unpackhi_epi64(half[j / 2], half[j / 2]) : half[j / 2];
      x[j] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(quarter)), s);
    }
#endif
#else
    alignas(64) float code[q6_block];
    for (int j = 0; j < 8; ++j) {
      const unsigned first = p[j], second = p[j + 8], high = p[j + 16];
      code[j] = static_cast<float>(static_cast<int>((first & 15) | (high << 4 & 48)) - 32);
      code[j + 8] = static_cast<float>(static_cast<int>((second & 15) | (high << 2 & 48)) - 32);
      code[j + 16] = static_cast<float>(static_cast<int>(first >> 4 | (high & 48)) - 32);
      code[j + 24] = static_cast<float>(static_cast<int>(second >> 4 | (high >> 2 & 48)) - 32);
    }
    const vec<float> s = broadcast(float_of_bits(std::uint32_t(p[24]) << 16 | std::uint32_t(p[25]) << 24));
    for (int j = 0; j < vectors; ++j) x[j] = simd::load(code + j * lanes<float>) * s;
#endif
  }

  /// The block is in the row as a whole, so all of it is read; a scale NaN must not reach beyond `count`.
  static DIFFATTN_INLINE void load_part(const unsigned char* row, index_t i, index_t count, vec<float> (&x)[vectors]) noexcept {
    load(row, i, x);
    for (int j = 0; j < vectors; ++j) x[j] = first_lanes(x[j], count - j * lanes<float>);
  }

 private:
#if defined(__AVX2__)
  /// The 32 codes, signed bytes. The upper two bits of a code, already less 32, come from a table.
  static DIFFATTN_INLINE __m256i codes(const unsigned char* p) noexcept {
    std::int64_t high_bits;
    std::memcpy(&high_bits, p + 16, sizeof high_bits);
    const __m256i low = _mm256_srlv_epi64(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                                          _mm256_setr_epi64x(0, 0, 4, 4));
    const __m256i high = _mm256_srlv_epi64(_mm256_set1_epi64x(high_bits), _mm256_setr_epi64x(0, 2, 4, 6));
    const __m256i table = _mm256_set1_epi32(0x1000F0E0);
    return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)),
                           _mm256_shuffle_epi8(table, _mm256_and_si256(high, _mm256_set1_epi8(3))));
  }
#endif
};

/// A whole row as numbers of type T, its scale applied. T is double for f64 and float for the others.
template <storage S, class T>
DIFFATTN_INLINE void decode_row_as(const unsigned char* row, index_t width, T* out) noexcept {
  using format = codec<S, T>;
  const vec<T> scale = broadcast(format::scale(row));
  vec<T> x[format::vectors];
  index_t i = 0;
  for (; i + format::step <= width; i += format::step) {
    format::load(row, i, x);
    for (int j = 0; j < format::vectors; ++j) store(out + i + j * lanes<T>, format::row_scale ? x[j] * scale : x[j]);
  }
  if (i == width) return;
  alignas(64) T rest[format::step];
  format::load_part(row, i, width - i, x);
  for (int j = 0; j < format::vectors; ++j) store(rest + j * lanes<T>, format::row_scale ? x[j] * scale : x[j]);
  std::memcpy(out + i, rest, static_cast<std::size_t>(width - i) * sizeof(T));
}

/// f(type) with the storage type as a constant: f64 for double, any other for float.
template <class T, class F>
DIFFATTN_INLINE void with_storage(storage type, F&& f) noexcept {
  if constexpr (std::is_same_v<T, double>) {
    static_cast<void>(type);
    f(std::integral_constant<storage, storage::f64>{});
  } else {
    switch (type) {
      case storage::f64: break;
      case storage::f32: return f(std::integral_constant<storage, storage::f32>{});
      case storage::f16: return f(std::integral_constant<storage, storage::f16>{});
      case storage::bf16: return f(std::integral_constant<storage, storage::bf16>{});
      case storage::int8: return f(std::integral_constant<storage, storage::int8>{});
      case storage::q6: return f(std::integral_constant<storage, storage::q6>{});
    }
  }
}

template <class T>
DIFFATTN_NOINLINE void decode_row(storage type, const unsigned char* row, index_t width, T* out) noexcept {
  with_storage<T>(type, [&](auto t) { decode_row_as<t()>(row, width, out); });
}

}  // namespace simd
DIFFATTN_ISA_NAMESPACE_END

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
