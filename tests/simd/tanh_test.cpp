// SPDX-License-Identifier: MIT
// tanh of the kernels against the C library's in the next wider type.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <diffattn/simd/tanh.hpp>
#include <limits>
#include <vector>

#include "../support/random.hpp"

namespace {

namespace simd = diffattn::simd;

template <class T>
std::vector<T> tanh_of(std::vector<T> x) {
  constexpr std::size_t lanes = static_cast<std::size_t>(simd::lanes<T>);
  const std::size_t n = x.size();
  x.resize((n + lanes - 1) / lanes * lanes);
  for (std::size_t i = 0; i < x.size(); i += lanes) simd::store(x.data() + i, simd::tanh<T>(simd::load(x.data() + i)));
  x.resize(n);
  return x;
}

/// Largest |result - tanh x| in units of the last place of tanh x. Long double has 11 bits more than double.
template <class T>
class worst_ulp {
 public:
  void add(const std::vector<T>& x) {
    const std::vector<T> y = tanh_of(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const long double exact = std::tanh(static_cast<long double>(x[i]));
      const int exponent = std::max(std::ilogb(exact), std::numeric_limits<T>::min_exponent - 1);
      const long double unit = std::ldexp(1.0L, exponent + 1 - std::numeric_limits<T>::digits);
      const double error = static_cast<double>(std::fabs(static_cast<long double>(y[i]) - exact) / unit);
      if (!(error <= worst_)) worst_ = error, at_ = x[i];
    }
  }
  double worst() const { return worst_; }
  T at() const { return at_; }

 private:
  double worst_ = 0;
  T at_ = 0;
};

template <class T>
struct TanhOf : testing::Test {
  static constexpr double bound = 4;  ///< ulp
  void expect_bound(const std::vector<T>& x) const {
    worst_ulp<T> error;
    error.add(x);
    RecordProperty("worst_ulp", std::to_string(error.worst()));
    std::printf("worst error %.4f ulp at %.17g\n", error.worst(), static_cast<double>(error.at()));
    EXPECT_LT(error.worst(), bound) << "at " << error.at();
  }
};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(TanhOf, types);

TYPED_TEST(TanhOf, AllExponents) {
  using T = TypeParam;
  using limits = std::numeric_limits<T>;
  test::random_source random(5);
  std::vector<T> x;
  for (int e = limits::min_exponent - limits::digits; e < limits::max_exponent; ++e)
    for (int i = 0; i < 300; ++i) {
      const T size = std::ldexp(static_cast<T>(i == 0 ? 1.0 : 1 + random.uniform()), e);
      x.push_back(i % 2 == 0 ? size : -size);
    }
  this->expect_bound(x);
}

// Where most logits lie, and on both sides of 0.35, where the series gives way to the power of two.
TYPED_TEST(TanhOf, NearZeroAndNearTheSeam) {
  using T = TypeParam;
  test::random_source random(6);
  std::vector<T> x;
  for (int i = 0; i < 400'000; ++i) {
    const double u = 2 * random.uniform() - 1;
    x.insert(x.end(), {static_cast<T>(u), static_cast<T>(0.01 * u), static_cast<T>(0.35 + 0.01 * u), static_cast<T>(10 * u)});
  }
  T up = T(0.35), down = T(0.35);
  for (int i = 0; i < 2000; ++i) {
    x.insert(x.end(), {up, down, -up, -down});
    up = std::nextafter(up, T(1)), down = std::nextafter(down, T(0));
  }
  this->expect_bound(x);
}

// A cap that is far away must not change a logit: tanh(x) = x (1 - x²/3 …).
TYPED_TEST(TanhOf, TinyIsItself) {
  using T = TypeParam;
  using limits = std::numeric_limits<T>;
  std::vector<T> x;
  for (T a = std::sqrt(limits::epsilon()) / 2; a > limits::min(); a *= T(0.37)) x.insert(x.end(), {a, -a});
  const std::vector<T> y = tanh_of(x);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_LE(std::fabs(y[i] - x[i]), limits::epsilon() * std::fabs(x[i])) << x[i];
}

TYPED_TEST(TanhOf, Ends) {
  using T = TypeParam;
  using limits = std::numeric_limits<T>;
  const T inf = limits::infinity(), nan = limits::quiet_NaN();
  const std::vector<T> y = tanh_of<T>({T(0), -T(0), inf, -inf, limits::max(), limits::lowest(), T(22), T(-22), nan, -nan});
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(y[i], i < 2 ? T(0) : i % 2 == 0 ? T(1) : T(-1)) << i;
  EXPECT_TRUE(std::isnan(y[8]) && std::isnan(y[9]));
}

TYPED_TEST(TanhOf, OddAndWithinOne) {
  using T = TypeParam;
  test::random_source random(7);
  std::vector<T> x, negative;
  for (int i = 0; i < 100'000; ++i)
    x.push_back(static_cast<T>(std::ldexp(random.uniform(), static_cast<int>(random.integer(-9, 5)))));
  for (const T a : x) negative.push_back(-a);
  const std::vector<T> y = tanh_of(x), z = tanh_of(negative);
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(y[i], -z[i]) << x[i];
    ASSERT_LE(y[i], T(1)) << x[i];
  }
}

}  // namespace
