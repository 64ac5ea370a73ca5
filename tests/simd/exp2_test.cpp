// SPDX-License-Identifier: MIT
// 2^x of the kernels against the C library's in the next wider type.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <diffattn/simd/exp2.hpp>
#include <limits>
#include <vector>

#include "../support/random.hpp"

namespace {

namespace simd = diffattn::simd;

template <class T>
std::vector<T> exp2_of(std::vector<T> x) {
  constexpr std::size_t lanes = static_cast<std::size_t>(simd::lanes<T>);
  const std::size_t n = x.size();
  x.resize((n + lanes - 1) / lanes * lanes);
  for (std::size_t i = 0; i < x.size(); i += lanes) simd::store(x.data() + i, simd::exp2<T>(simd::load(x.data() + i)));
  x.resize(n);
  return x;
}

float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
std::uint32_t to_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

/// Largest |result - 2^x| in units of the last place of 2^x, for normal results.
template <class T, class Wide>
class worst_ulp {
 public:
  void add(const std::vector<T>& x) {
    const std::vector<T> y = exp2_of(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const Wide exact = std::exp2(static_cast<Wide>(x[i]));
      const Wide unit = std::ldexp(Wide(1), std::ilogb(exact) + 1 - std::numeric_limits<T>::digits);
      const double error = static_cast<double>(std::fabs(static_cast<Wide>(y[i]) - exact) / unit);
      if (!(error <= worst_)) worst_ = error, at_ = x[i];
    }
  }
  double worst() const { return worst_; }
  T at() const { return at_; }

 private:
  double worst_ = 0;
  T at_ = 0;
};

// Every `step`-th float of [-126, 127], 0 included from both sides. DIFFATTN_EXP2_STEP=1 takes all (half a minute).
TEST(Exp2, FloatBitPatterns) {
  const char* const given = std::getenv("DIFFATTN_EXP2_STEP");
  const std::uint32_t step = given ? static_cast<std::uint32_t>(std::strtoul(given, nullptr, 10)) : 211;
  worst_ulp<float, double> error;
  std::vector<float> x;
  const auto sweep = [&](std::uint32_t first, std::uint32_t last) {
    for (std::uint64_t bits = first; bits <= last; bits += step) {
      x.push_back(from_bits(static_cast<std::uint32_t>(bits)));
      if (x.size() == 4096) error.add(x), x.clear();
    }
    x.push_back(from_bits(last));
  };
  sweep(0, to_bits(127.0f));
  sweep(to_bits(-0.0f), to_bits(-126.0f));
  error.add(x);
  RecordProperty("worst_ulp", std::to_string(error.worst()));
  std::printf("worst error %.4f ulp at %.9g\n", error.worst(), static_cast<double>(error.at()));
  EXPECT_LT(error.worst(), 1.0) << "at " << error.at();
}

TEST(Exp2, DoubleSamples) {
  test::random_source random(3);
  worst_ulp<double, long double> error;
  for (int block = 0; block < 300; ++block) {
    std::vector<double> x;
    for (int i = 0; i < 4096; ++i) {
      const double range = block % 3 == 0 ? 1022 : block % 3 == 1 ? 20 : 1;
      x.push_back(range * (2 * random.uniform() - 1));
    }
    error.add(x);
  }
  RecordProperty("worst_ulp", std::to_string(error.worst()));
  std::printf("worst error %.4f ulp at %.17g\n", error.worst(), error.at());
  EXPECT_LT(error.worst(), 1.1) << "at " << error.at();
}

template <class T>
struct Exp2Of : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Exp2Of, types);

TYPED_TEST(Exp2Of, IntegersAreExact) {
  const int top = sizeof(TypeParam) == 4 ? 127 : 1023;
  std::vector<TypeParam> x;
  for (int n = 1 - top; n <= top; ++n) x.push_back(static_cast<TypeParam>(n));
  const std::vector<TypeParam> y = exp2_of(x);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(y[i], std::exp2(x[i])) << x[i];
}

TYPED_TEST(Exp2Of, SmallIsExactlyZero) {
  using T = TypeParam;
  const T bias = sizeof(T) == 4 ? T(127) : T(1023), edge = -(bias - T(0.5));
  const std::vector<T> x = {-std::numeric_limits<T>::infinity(),
                            std::numeric_limits<T>::lowest(),
                            T(-1e30),
                            T(-1e5),
                            -bias - 100,
                            -bias - 1,
                            -bias,
                            std::nextafter(edge, -std::numeric_limits<T>::infinity())};
  for (const T y : exp2_of(x)) {
    EXPECT_EQ(y, T(0));
    EXPECT_FALSE(std::signbit(y));
  }
  // From the edge on, where results are not normal numbers, the error stays below the smallest of them.
  std::vector<T> low;
  for (int i = 0; i <= 1000; ++i) low.push_back(edge + static_cast<T>(i) / T(2000));
  const std::vector<T> y = exp2_of(low);
  for (std::size_t i = 1; i < low.size(); ++i)
    EXPECT_NEAR(double(y[i]), double(std::exp2(low[i])), 2 * double(std::numeric_limits<T>::denorm_min()));
}

TYPED_TEST(Exp2Of, NanOfAnyPayloadStaysNan) {
  using T = TypeParam;
  using bits_t = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  constexpr int mantissa = std::numeric_limits<T>::digits - 1;
  const bits_t exponent = ((bits_t(1) << (sizeof(T) * 8 - 1 - mantissa)) - 1) << mantissa;
  std::vector<T> x;
  for (const bits_t sign : {bits_t(0), bits_t(1) << (sizeof(T) * 8 - 1)}) {
    for (int i = 0; i < mantissa; ++i)
      for (const bits_t more : {bits_t(0), bits_t(1), (bits_t(1) << mantissa) - 1}) {
        const bits_t bits = sign | exponent | (bits_t(1) << i) | more;
        T nan;
        std::memcpy(&nan, &bits, sizeof nan);
        x.push_back(nan);
      }
  }
  for (const T y : exp2_of(x)) EXPECT_TRUE(std::isnan(y));
}

}  // namespace
