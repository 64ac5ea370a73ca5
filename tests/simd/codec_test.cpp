// SPDX-License-Identifier: MIT
// Stored rows against scalar arithmetic that follows the words of storage.hpp.

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <diffattn/simd/encode.hpp>
#include <limits>
#include <string>
#include <vector>

#include "../support/random.hpp"

namespace {

namespace simd = diffattn::simd;
using diffattn::index_t;
using diffattn::row_bytes;
using diffattn::storage;

constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();

float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
template <class T>
std::uint64_t to_bits(T x) {
  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t> bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Bytes that end where their allocation ends and begin `shift` bytes behind its start, for the address sanitizer and for
// every alignment.
class guarded_bytes {
 public:
  guarded_bytes(index_t bytes, index_t shift)
      : memory_(static_cast<unsigned char*>(std::malloc(static_cast<std::size_t>(bytes + shift)))),
        shift_(shift),
        bytes_(bytes) {
    std::memset(memory_, 0xEE, static_cast<std::size_t>(bytes + shift));
  }
  guarded_bytes(const guarded_bytes&) = delete;
  guarded_bytes& operator=(const guarded_bytes&) = delete;
  ~guarded_bytes() { std::free(memory_); }
  unsigned char* data() const { return memory_ + shift_; }
  std::vector<unsigned char> copy() const { return {data(), data() + bytes_}; }

 private:
  unsigned char* memory_;
  index_t shift_, bytes_;
};

template <class T>
void encode(storage type, const std::vector<T>& x, unsigned char* row) {
  const index_t width = static_cast<index_t>(x.size());
  simd::encode_row<T>(
      type, width,
      [&](index_t i, index_t n, T* block) {
        EXPECT_EQ(i % 32, 0);
        EXPECT_EQ(n, std::min<index_t>(32, width - i));
        std::copy_n(x.begin() + i, n, block);
      },
      row);
}
template <class T>
std::vector<unsigned char> encode(storage type, const std::vector<T>& x, index_t shift = 1) {
  guarded_bytes row(row_bytes(type, static_cast<index_t>(x.size())), shift);
  encode(type, x, row.data());
  return row.copy();
}
template <class T = float>
std::vector<T> decode(storage type, const std::vector<unsigned char>& bytes, index_t width, index_t shift = 1) {
  guarded_bytes row(static_cast<index_t>(bytes.size()), shift);
  std::copy(bytes.begin(), bytes.end(), row.data());
  std::vector<T> x(static_cast<std::size_t>(width));
  simd::decode_row<T>(type, row.data(), width, x.data());
  return x;
}

template <class T>
void expect_same_bits(const std::vector<T>& actual, const std::vector<T>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    ASSERT_EQ(to_bits(actual[i]), to_bits(expected[i])) << "number " << i << " of " << actual.size() << ": " << actual[i];
}

// ---- f16 and bf16: a sign, exponents from 2^least on, `mantissa` bits ----

struct half_format {
  storage type;
  int mantissa, least;

  std::uint32_t infinity_bits() const { return 0x7FFFu >> mantissa << mantissa; }
  bool is_nan(std::uint32_t h) const { return (h & 0x7FFF) > infinity_bits(); }
  double value(std::uint32_t h) const {
    const int exponent = static_cast<int>((h & 0x7FFF) >> mantissa), fraction = static_cast<int>(h & ((1u << mantissa) - 1));
    const double magnitude = (h & 0x7FFF) == infinity_bits() ? HUGE_VAL
                             : exponent == 0                 ? std::ldexp(fraction, least - mantissa)
                                             : std::ldexp(fraction + (1 << mantissa), exponent - 1 + least - mantissa);
    return h & 0x8000 ? -magnitude : magnitude;
  }
  std::uint32_t nearest(float x) const {
    const std::uint32_t bits = static_cast<std::uint32_t>(to_bits(x)), sign = bits >> 16 & 0x8000;
    const std::uint32_t quiet = 1u << (mantissa - 1), payload = bits >> (23 - mantissa) & (2 * quiet - 1);
    if (std::isnan(x)) return sign | infinity_bits() | quiet | payload;
    if (std::isinf(x)) return sign | infinity_bits();
    if (x == 0) return sign;
    const double magnitude = std::fabs(double(x));
    const int exponent = std::max(std::ilogb(magnitude), least);
    const std::uint32_t units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
    // A full mantissa carries into the exponent, from the largest number into infinity.
    const std::uint32_t h = units + (static_cast<std::uint32_t>(exponent - least) << mantissa);
    return sign | std::min(h, infinity_bits());
  }
};

constexpr half_format halves[] = {{storage::f16, 10, -14}, {storage::bf16, 7, -126}};

std::vector<unsigned char> bytes_of(const std::vector<std::uint16_t>& h) {
  std::vector<unsigned char> bytes(2 * h.size());
  std::memcpy(bytes.data(), h.data(), bytes.size());
  return bytes;
}

TEST(Codec, HalvesDecodeExactlyAndComeBack) {
  for (const half_format& format : halves) {
    std::vector<std::uint16_t> all(65536);
    for (std::size_t h = 0; h < all.size(); ++h) all[h] = static_cast<std::uint16_t>(h);
    const std::vector<float> x = decode(format.type, bytes_of(all), 65536);
    for (std::uint32_t h = 0; h < 65536; ++h) {
      if (format.is_nan(h)) {
        // binary16 is converted, which makes a NaN quiet; bfloat16 only moves.
        const std::uint32_t quiet = format.type == storage::f16 ? 1u << 22 : 0;
        const std::uint32_t payload = (h & ((1u << format.mantissa) - 1)) << (23 - format.mantissa);
        ASSERT_EQ(to_bits(x[h]), (h & 0x8000) << 16 | 0x7F800000u | quiet | payload) << h;
      } else {
        ASSERT_EQ(double(x[h]), format.value(h)) << h;
        ASSERT_EQ(std::signbit(x[h]), h >= 0x8000);
      }
    }
    std::vector<std::uint16_t> back(65536);
    for (std::size_t h = 0; h < back.size(); ++h)
      back[h] = static_cast<std::uint16_t>(format.is_nan(all[h]) ? all[h] | 1u << (format.mantissa - 1) : all[h]);
    EXPECT_EQ(encode(format.type, x), bytes_of(back));
  }
}

TEST(Codec, HalvesRoundToNearest) {
  test::random_source random(1);
  for (const half_format& format : halves) {
    std::vector<float> x;
    const auto add_around = [&](double middle) {
      const float m = static_cast<float>(middle);
      ASSERT_EQ(double(m), middle);
      for (const float y : {m, std::nextafter(m, infinity), std::nextafter(m, -infinity)}) x.push_back(y), x.push_back(-y);
    };
    const std::uint32_t top = format.infinity_bits();
    for (std::uint32_t h = 0; h + 1 < top; ++h) {
      add_around(format.value(h));
      add_around((format.value(h) + format.value(h + 1)) / 2);
    }
    add_around(format.value(top - 1));
    add_around(format.value(top - 1) + (format.value(top - 1) - format.value(top - 2)) / 2);
    for (const std::uint32_t nan_bits : {0x7F800001u, 0x7F80FFFFu, 0x7FBFFFFFu, 0x7FC00000u, 0xFFFFFFFFu, 0xFF801234u})
      x.push_back(from_bits(nan_bits));
    for (const float y : {infinity, FLT_MAX, FLT_MIN, from_bits(1)}) x.push_back(y), x.push_back(-y);
    for (int i = 0; i < 1000000; ++i) x.push_back(from_bits(static_cast<std::uint32_t>(random.integer(0, 0xFFFFFFFF))));
    std::vector<std::uint16_t> expected;
    for (const float y : x) expected.push_back(static_cast<std::uint16_t>(format.nearest(y)));
    const std::vector<unsigned char> bytes = encode(format.type, x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      std::uint16_t h;
      std::memcpy(&h, bytes.data() + 2 * i, 2);
      ASSERT_EQ(h, expected[i]) << x[i] << ' ' << std::hex << to_bits(x[i]);
      const double error = std::fabs(format.value(h) - double(x[i]));
      const double bound =
          std::ldexp(std::fabs(double(x[i])), -1 - format.mantissa) + std::ldexp(1.0, format.least - format.mantissa - 1);
      if (!format.is_nan(h) && (h & 0x7FFF) != top) {
        ASSERT_LE(error, bound) << x[i];
      }
    }
  }
}

// ---- int8 and q6 by the document ----

float scale_of(const std::vector<float>& x, float top) {
  float largest = 0;
  for (const float y : x) {
    if (!std::isfinite(y)) return nan;
    largest = std::max(largest, std::fabs(y));
  }
  return largest < top * FLT_MIN ? 0 : largest / top;
}
int code_of(float x, float scale) {
  return scale > 0 ? static_cast<int>(std::nearbyint(x / scale)) : 0;
}

std::vector<unsigned char> int8_row(const std::vector<float>& x) {
  const float scale = scale_of(x, 127);
  std::vector<unsigned char> bytes(4);
  std::memcpy(bytes.data(), &scale, 4);
  for (const float y : x) bytes.push_back(static_cast<unsigned char>(code_of(y, scale) & 0xFF));
  return bytes;
}

void set_bits(unsigned char& byte, int at, unsigned bits) {
  byte = static_cast<unsigned char>(byte | bits << at);
}

std::vector<unsigned char> q6_block(const std::vector<unsigned>& u, std::uint32_t scale) {
  std::vector<unsigned char> bytes(26);
  for (std::size_t i = 0; i < 32; ++i) {
    set_bits(bytes[i % 16], i < 16 ? 0 : 4, u[i] & 15);
    set_bits(bytes[16 + i % 8], static_cast<int>(i / 8) * 2, u[i] >> 4);
  }
  bytes[24] = static_cast<unsigned char>(scale & 0xFF);
  bytes[25] = static_cast<unsigned char>(scale >> 8);
  return bytes;
}

std::vector<unsigned char> q6_row(std::vector<float> x) {
  x.resize((x.size() + 31) / 32 * 32);
  std::vector<unsigned char> bytes;
  for (auto at = x.begin(); at != x.end(); at += 32) {
    const std::vector<float> block(at, at + 32);
    const float exact = scale_of(block, 31);
    std::uint32_t scale = static_cast<std::uint32_t>(to_bits(exact) >> 16);
    if (from_bits(scale << 16) < exact) ++scale;
    std::vector<unsigned> u;
    for (const float y : block) u.push_back(static_cast<unsigned>(code_of(y, from_bits(scale << 16)) + 32));
    const std::vector<unsigned char> more = q6_block(u, scale);
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  return bytes;
}

std::vector<index_t> widths() {
  std::vector<index_t> w;
  for (index_t i = 0; i <= 70; ++i) w.push_back(i);
  for (const index_t i : {80, 96, 128, 129, 256}) w.push_back(i);
  return w;
}

TEST(Codec, ScaledRowsFollowTheDocument) {
  test::random_source random(2);
  for (const index_t width : widths())
    for (const double amplitude : {1.0, 1e-3, 1e30, 5e37, 1e-36, 1e-37, 1e-40, 0.0}) {
      const std::vector<float> x = test::normal_vector<float>(width, random, amplitude);
      const index_t shift = random.integer(0, 9);
      const std::vector<unsigned char> int8 = encode(storage::int8, x, shift), q6 = encode(storage::q6, x, shift);
      ASSERT_EQ(int8, int8_row(x)) << width << ' ' << amplitude;
      ASSERT_EQ(q6, q6_row(x)) << width << ' ' << amplitude;
      const std::vector<float> y = decode(storage::int8, int8, width, shift), z = decode(storage::q6, q6, width, shift);
      for (std::size_t i = 0; i < x.size(); ++i) {
        double row = 0, block = 0;
        for (std::size_t j = 0; j < x.size(); ++j) {
          row = std::max(row, std::fabs(double(x[j])));
          if (j / 32 == i / 32) block = std::max(block, std::fabs(double(x[j])));
        }
        if (row >= 127 * double(FLT_MIN)) {
          ASSERT_LE(std::fabs(double(y[i]) - double(x[i])), row / 253.9);
        } else {
          ASSERT_EQ(to_bits(y[i]), 0u);
        }
        if (block >= 31 * double(FLT_MIN)) {
          ASSERT_LE(std::fabs(double(z[i]) - double(x[i])), block / 61.5);
        } else {
          ASSERT_EQ(to_bits(z[i]), 0u);
        }
      }
    }
}

TEST(Codec, Int8ByHand) {
  const std::vector<float> x = {127, -127, 0.5f, 1.5f, 2.5f, -3, -0.0f, -2.5f};
  const std::vector<unsigned char> row = {0x00, 0x00, 0x80, 0x3F, 127, 0x81, 0, 2, 2, 0xFD, 0, 0xFE};
  EXPECT_EQ(encode(storage::int8, x), row);
  expect_same_bits(decode(storage::int8, row, 8), {127, -127, 0, 2, 2, -3, 0, -2});
}

TEST(Codec, Q6ByHand) {
  std::vector<float> x(32);
  x[0] = 31, x[16] = -31, x[8] = -16.5f, x[24] = 5.5f, x[1] = 1;
  std::vector<unsigned char> row(26);
  row[0] = 0x1F, row[1] = 0x01, row[8] = 0x60;  // u = 63, 33, 16 and, above, 1, 32, 38
  for (std::size_t i = 16; i < 24; ++i) row[i] = 0xAA;
  row[16] = 0x87;
  row[24] = 0x80, row[25] = 0x3F;
  EXPECT_EQ(encode(storage::q6, x), row);
  x[8] = -16, x[24] = 6;
  expect_same_bits(decode(storage::q6, row, 32), x);
}

TEST(Codec, EveryCodeInEveryPlace) {
  for (std::size_t place = 0; place < 32; ++place) {
    for (int code = -31; code <= 31; ++code) {
      std::vector<float> x(32, -2.5f);
      x[(place + 5) % 32] = -0.125f * 31;
      x[place] = 0.125f * static_cast<float>(code);
      const std::vector<unsigned char> row = encode(storage::q6, x);
      ASSERT_EQ(row, q6_row(x));
      expect_same_bits(decode(storage::q6, row, 32), x);
    }
    for (int code = -127; code <= 127; ++code) {
      std::vector<float> x(32, -2.5f);
      x[(place + 5) % 32] = -0.125f * 127;
      x[place] = 0.125f * static_cast<float>(code);
      const std::vector<unsigned char> row = encode(storage::int8, x);
      ASSERT_EQ(row, int8_row(x));
      expect_same_bits(decode(storage::int8, row, 32), x);
    }
  }
}

// Also what no encoder writes: u = 0 and any scale.
TEST(Codec, AnyQ6BlockDecodesByTheDocument) {
  test::random_source random(3);
  for (int repeat = 0; repeat < 20000; ++repeat) {
    std::vector<unsigned> u(32);
    for (unsigned& code : u) code = static_cast<unsigned>(random.integer(0, 63));
    const std::uint32_t scale = static_cast<std::uint32_t>(random.integer(0, 0x7F80));
    std::vector<float> expected;
    for (const unsigned code : u) expected.push_back(static_cast<float>(static_cast<int>(code) - 32) * from_bits(scale << 16));
    const std::vector<float> x = decode(storage::q6, q6_block(u, scale), 32);
    for (std::size_t i = 0; i < 32; ++i) {
      if (std::isnan(expected[i])) {  // 0 · infinity
        ASSERT_TRUE(std::isnan(x[i]));
      } else {
        ASSERT_EQ(to_bits(x[i]), to_bits(expected[i])) << scale << ' ' << u[i];
      }
    }
  }
}

TEST(Codec, LargestInEveryPosition) {
  test::random_source random(4);
  for (const index_t width : {1, 31, 33, 64, 70})
    for (index_t at = 0; at < width; ++at)
      for (const float largest : {9.0f, -9.0f, 3e38f, -3e38f, infinity, -infinity, nan, -nan, from_bits(0x7F800001)}) {
        std::vector<float> x = test::normal_vector<float>(width, random);
        x[static_cast<std::size_t>(at)] = largest;
        const std::vector<unsigned char> int8 = encode(storage::int8, x), q6 = encode(storage::q6, x);
        ASSERT_EQ(int8, int8_row(x)) << width << ' ' << at << ' ' << largest;
        ASSERT_EQ(q6, q6_row(x)) << width << ' ' << at << ' ' << largest;
        const std::vector<float> y = decode(storage::int8, int8, width), z = decode(storage::q6, q6, width);
        for (index_t i = 0; i < width; ++i) {
          const std::size_t j = static_cast<std::size_t>(i);
          ASSERT_EQ(std::isnan(y[j]), !std::isfinite(largest));
          ASSERT_EQ(std::isnan(z[j]), !std::isfinite(largest) && i / 32 == at / 32);
        }
        if (std::isfinite(largest)) {
          ASSERT_NEAR(y[static_cast<std::size_t>(at)] / largest, 1, 1e-6);
          ASSERT_NEAR(z[static_cast<std::size_t>(at)] / largest, 1, 0.5 / 31 * (1 + 0x1p-7));
        }
      }
}

// The edge of scale 0 and its neighbours.
TEST(Codec, SmallestScale) {
  for (const float top : {127.0f, 31.0f}) {
    const storage type = top > 100 ? storage::int8 : storage::q6;
    const float edge = top * FLT_MIN;
    for (const float largest : {edge, std::nextafter(edge, 0.0f), std::nextafter(edge, 1.0f), FLT_MIN, from_bits(1), -0.0f}) {
      const std::vector<float> x = {0.5f * largest, -largest, 0.0f, -0.0f};
      const std::vector<unsigned char> row = encode(type, x);
      ASSERT_EQ(row, type == storage::int8 ? int8_row(x) : q6_row(x));
      const std::vector<float> y = decode(type, row, 4);
      for (std::size_t i = 0; i < 4; ++i)
        EXPECT_LE(std::fabs(double(y[i]) - double(x[i])), largest < edge ? double(largest) : double(largest) / 61.5);
      if (largest < edge) expect_same_bits(y, std::vector<float>(4));
    }
  }
}

// ---- the steps of the kernels ----

template <storage S, class T>
struct format {
  static constexpr storage type = S;
  using number = T;
};
template <class Format>
struct CodecOf : testing::Test {};
using formats = testing::Types<format<storage::f64, double>, format<storage::f32, float>, format<storage::f16, float>,
                               format<storage::bf16, float>, format<storage::int8, float>, format<storage::q6, float>>;
TYPED_TEST_SUITE(CodecOf, formats);

TYPED_TEST(CodecOf, StepsAgreeWithRows) {
  constexpr storage type = TypeParam::type;
  using T = typename TypeParam::number;
  using codec = simd::codec<type, T>;
  static_assert(codec::vectors == (type == storage::q6 ? 32 / simd::lanes<float> : 1));
  static_assert(codec::step == codec::vectors * simd::lanes<T>);
  static_assert(codec::row_scale == (type == storage::int8));

  test::random_source random(5);
  for (const index_t width : widths())
    for (const bool with_nan : {false, true}) {
      std::vector<T> x = test::normal_vector<T>(width, random);
      if (with_nan && width > 0)
        x[static_cast<std::size_t>(random.integer(0, width - 1))] = std::numeric_limits<T>::quiet_NaN();
      const index_t shift = random.integer(0, 9);
      guarded_bytes row(row_bytes(type, width), shift);
      encode(type, x, row.data());
      const std::vector<T> expected = decode<T>(type, row.copy(), width, shift);
      if (type == storage::f32 || type == storage::f64) expect_same_bits(expected, x);

      const auto expect_step = [&](index_t i, index_t count, const simd::vec<T>(&v)[codec::vectors]) {
        T step[codec::step];
        for (int j = 0; j < codec::vectors; ++j)
          simd::store<T>(step + j * simd::lanes<T>, codec::row_scale ? v[j] * simd::broadcast(codec::scale(row.data())) : v[j]);
        for (index_t j = 0; j < count; ++j) {
          const T e = expected[static_cast<std::size_t>(i + j)];
          ASSERT_TRUE(std::isnan(e) ? std::isnan(step[j]) : to_bits(step[j]) == to_bits(e)) << width << ' ' << i << ' ' << j;
        }
        for (int j = 0; j < codec::vectors; ++j) simd::store<T>(step + j * simd::lanes<T>, v[j]);
        for (index_t j = count; j < codec::step; ++j) ASSERT_EQ(to_bits(step[j]), 0u) << width << ' ' << i << ' ' << j;
      };
      simd::vec<T> v[codec::vectors];
      for (index_t i = 0; i < width; i += codec::step) {
        for (index_t count = 1; count < codec::step && i + count <= width; ++count) {
          codec::load_part(row.data(), i, count, v);
          expect_step(i, count, v);
        }
        if (i + codec::step > width) continue;
        codec::load(row.data(), i, v);
        expect_step(i, codec::step, v);
      }
      if (!codec::row_scale) {
        EXPECT_EQ(codec::scale(row.data()), T(1));
      }
    }
}

// The last numbers of a row lie at the end of its bytes: a part that reads farther is seen by the address sanitizer, and one
// that takes bytes from the next row here.
TYPED_TEST(CodecOf, RowsDoNotMix) {
  constexpr storage type = TypeParam::type;
  using T = typename TypeParam::number;
  for (const index_t width : widths()) {
    const index_t bytes = row_bytes(type, width);
    const std::vector<T> one(static_cast<std::size_t>(width), T(1)), two(static_cast<std::size_t>(width), T(-2));
    guarded_bytes rows(3 * bytes, 1);
    for (const index_t r : {0, 2, 1}) encode(type, r == 1 ? two : one, rows.data() + r * bytes);
    for (const index_t r : {0, 1, 2}) {
      std::vector<T> x(static_cast<std::size_t>(width) + 1, T(7));
      simd::decode_row<T>(type, rows.data() + r * bytes, width, x.data());
      for (std::size_t i = 0; i < one.size(); ++i) ASSERT_NEAR(x[i], r == 1 ? -2 : 1, 0.04) << width << ' ' << i;
      ASSERT_EQ(x.back(), T(7));
    }
  }
}

}  // namespace
