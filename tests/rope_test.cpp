// SPDX-License-Identifier: MIT

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <diffattn/rope.hpp>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

namespace {

using diffattn::index_t;
using diffattn::rope_config;
using diffattn::rope_scaling;
using diffattn::rope_style;
using diffattn::rope_view;
using diffattn::status;

constexpr double inf = std::numeric_limits<double>::infinity(), not_a_number = std::numeric_limits<double>::quiet_NaN();

/// A table with its memory.
struct table {
  std::vector<float> cos, sin;
  rope_view view;

  table(const rope_config& c, index_t first, index_t positions, rope_style style)
      : cos(static_cast<std::size_t>(positions * c.width / 2)), sin(cos.size()) {
    EXPECT_EQ(diffattn::fill_rope_table(c, first, positions, cos.data(), sin.data()), status::ok);
    view = {cos.data(), sin.data(), positions, c.width, style, first};
  }
};

rope_config plain(index_t width, double base = 10000) {
  rope_config c;
  c.width = width;
  c.base = base;
  return c;
}

rope_config llama31() {
  rope_config c = plain(128, 500000);
  c.scaling = rope_scaling::llama3;
  c.factor = 8;
  c.original_positions = 8192;
  return c;
}

rope_config yarn(index_t width, double base, double factor, index_t original) {
  rope_config c = plain(width, base);
  c.scaling = rope_scaling::yarn;
  c.factor = factor;
  c.original_positions = original;
  return c;
}

template <class T>
std::vector<T> random_row(index_t n, unsigned seed = 1) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> uniform(-2, 2);
  std::vector<T> row(static_cast<std::size_t>(n));
  for (T& x : row) x = static_cast<T>(uniform(engine));
  return row;
}

/// The definition: adjacent channels are a complex number, multiplied by exp(i p f). The other style is the same on permuted
/// channels.
template <class T>
std::vector<double> naive(const std::vector<T>& x, index_t width, double base, double position, rope_style style) {
  std::vector<double> y(x.begin(), x.end());
  for (index_t i = 0; i < width / 2; ++i) {
    const auto re = static_cast<std::size_t>(style == rope_style::half ? i : 2 * i);
    const auto im = static_cast<std::size_t>(style == rope_style::half ? i + width / 2 : 2 * i + 1);
    const double angle = position / std::pow(base, 2.0 * static_cast<double>(i) / static_cast<double>(width));
    const std::complex<double> z = std::complex<double>(x[re], x[im]) * std::polar(1.0, angle);
    y[re] = z.real(), y[im] = z.imag();
  }
  return y;
}

constexpr rope_style styles[] = {rope_style::interleaved, rope_style::half};

// ---- tables

TEST(RopeTable, FrequenciesWithoutScaling) {
  EXPECT_EQ(diffattn::rope_frequency(plain(4), 0), 1);
  EXPECT_DOUBLE_EQ(diffattn::rope_frequency(plain(4), 1), 0.01);
  EXPECT_DOUBLE_EQ(diffattn::rope_frequency(plain(8, 16), 1), 0.5);
  EXPECT_DOUBLE_EQ(diffattn::rope_frequency(plain(8, 16), 3), 0.125);
}

TEST(RopeTable, FilledByHand) {
  // Width 4, base 4: frequencies 1 and 1/2.
  const table t(plain(4, 4), 0, 3, rope_style::half);
  const double angles[] = {0, 0, 1, 0.5, 2, 1};
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(t.cos[i], static_cast<float>(std::cos(angles[i])));
    EXPECT_EQ(t.sin[i], static_cast<float>(std::sin(angles[i])));
  }
}

TEST(RopeTable, StartsAnywhere) {
  const rope_config c = plain(70);  // more than one block of pairs
  const table whole(c, -5, 4105, rope_style::half), part(c, 4090, 10, rope_style::half);
  const auto offset = static_cast<std::ptrdiff_t>(4095 * 35);
  EXPECT_TRUE(std::equal(part.cos.begin(), part.cos.end(), whole.cos.begin() + offset));
  EXPECT_TRUE(std::equal(part.sin.begin(), part.sin.end(), whole.sin.begin() + offset));
  EXPECT_EQ(whole.sin[0], static_cast<float>(std::sin(-5.0)));
  EXPECT_EQ(whole.cos[5 * 35], 1);
  // Doubles carry the angle, also where floats no longer count.
  const index_t far = (index_t{1} << 24) + 1;
  EXPECT_EQ(table(c, far, 1, rope_style::half).sin[0], static_cast<float>(std::sin(static_cast<double>(far))));
}

TEST(RopeTable, Linear) {
  rope_config c = plain(64);
  c.scaling = rope_scaling::linear;
  c.factor = 4;
  for (index_t i = 0; i < 32; ++i) {
    EXPECT_EQ(diffattn::rope_frequency(c, i), diffattn::rope_frequency(plain(64), i) / 4);
  }
}

TEST(RopeTable, Ntk) {
  rope_config c = plain(64);
  c.scaling = rope_scaling::ntk;
  c.factor = 4;
  EXPECT_EQ(diffattn::rope_frequency(c, 0), 1);
  // The rule was made so that the last pair is slowed down by the factor exactly.
  EXPECT_NEAR(diffattn::rope_frequency(c, 31) / diffattn::rope_frequency(plain(64), 31), 0.25, 1e-14);
  EXPECT_NEAR(diffattn::rope_frequency(c, 7), std::pow(10000 * std::pow(4.0, 64.0 / 62.0), -14.0 / 64.0), 1e-15);
  c.width = 2;  // one pair: the exponent of the factor would be infinite
  EXPECT_EQ(diffattn::rope_frequency(c, 0), 1);
}

TEST(RopeTable, DynamicNtkDependsOnTheLength) {
  rope_config c = plain(64);
  c.scaling = rope_scaling::dynamic_ntk;
  c.factor = 2;
  c.original_positions = 2048;
  for (const index_t length : {0, 1, 2047, 2048}) {
    c.sequence_length = length;
    for (index_t i = 0; i < 32; ++i) EXPECT_EQ(diffattn::rope_frequency(c, i), diffattn::rope_frequency(plain(64), i));
  }
  c.sequence_length = 4096;  // stretched by 2 * 2 - 1 = 3
  EXPECT_NEAR(diffattn::rope_frequency(c, 31) / diffattn::rope_frequency(plain(64), 31), 1.0 / 3, 1e-14);
}

TEST(RopeTable, Llama31) {
  const struct {
    index_t pair;
    double frequency;
  } known[] = {{0, 1.0},
               {1, 0.8146172338565447},
               {28, 0.003211445994752591},
               {29, 0.0021665707635033590},  // first one below 4 turns
               {31, 0.0008567514129196321},
               {34, 0.0001785078127679964},
               {35, 9.556212353964683e-05},  // first one below 1 turn
               {63, 3.068925988914511e-07}};
  for (const auto& k : known) EXPECT_NEAR(diffattn::rope_frequency(llama31(), k.pair) / k.frequency, 1, 1e-13) << k.pair;
  // The published case distinction by wavelength.
  for (index_t i = 0; i < 64; ++i) {
    const double f = std::pow(500000.0, -static_cast<double>(i) / 64), wavelength = 2 * std::acos(-1.0) / f;
    const double smooth = (8192 / wavelength - 1) / 3;
    const double want = wavelength < 2048 ? f : wavelength > 8192 ? f / 8 : (1 - smooth) * f / 8 + smooth * f;
    EXPECT_NEAR(diffattn::rope_frequency(llama31(), i) / want, 1, 1e-13) << i;
  }
}

TEST(RopeTable, Yarn) {
  // Qwen 2.5: the ramp runs from pair 23 to pair 40.
  const rope_config qwen = yarn(128, 1e6, 4, 32768);
  const double f23 = std::pow(1e6, -23.0 / 64), f30 = std::pow(1e6, -30.0 / 64), f40 = std::pow(1e6, -40.0 / 64);
  EXPECT_NEAR(diffattn::rope_frequency(qwen, 23) / f23, 1, 1e-14);
  EXPECT_NEAR(diffattn::rope_frequency(qwen, 30) / (f30 * (10.0 / 17 + 7.0 / 17 / 4)), 1, 1e-14);
  EXPECT_NEAR(diffattn::rope_frequency(qwen, 40) / (f40 / 4), 1, 1e-14);
  EXPECT_NEAR(diffattn::rope_frequency(qwen, 63) / 3.102344401879299e-07, 1, 1e-13);
}

TEST(RopeTable, YarnWithoutTruncation) {
  // gpt-oss: the ramp runs from 8.0928 to 17.398.
  rope_config c = yarn(64, 150000, 32, 4096);
  c.truncate = false;
  const struct {
    index_t pair;
    double frequency;
  } known[] = {{8, 0.050813274815461475},
               {9, 0.03170569618466377},
               {12, 0.006794959489732219},
               {17, 0.00012931870124506317},
               {18, 3.8308812373753384e-05}};
  for (const auto& k : known) EXPECT_NEAR(diffattn::rope_frequency(c, k.pair) / k.frequency, 1, 1e-13) << k.pair;
}

TEST(RopeTable, YarnRampOfNoLength) {
  rope_config c = yarn(64, 10000, 4, 2048);
  c.beta_fast = c.beta_slow = 2048 / (2 * std::acos(-1.0)) / std::pow(10000.0, 12.5 / 32);  // makes them meet at pair 12.5
  c.truncate = false;
  for (index_t i = 0; i < 32; ++i)
    EXPECT_NEAR(diffattn::rope_frequency(c, i) * std::pow(10000.0, static_cast<double>(i) / 32), i <= 12 ? 1 : 0.25, 1e-14);
  c = yarn(64, 10000, 4, 4);  // not one turn within the context: the ramp ends before it begins, nothing is interpolated
  for (index_t i = 0; i < 32; ++i) EXPECT_EQ(diffattn::rope_frequency(c, i), diffattn::rope_frequency(plain(64), i));
}

TEST(RopeTable, AttentionFactor) {
  EXPECT_EQ(diffattn::rope_attention_factor(plain(64)), 1);
  EXPECT_EQ(diffattn::rope_attention_factor(llama31()), 1);
  rope_config c = yarn(64, 10000, 4, 2048);
  EXPECT_DOUBLE_EQ(diffattn::rope_attention_factor(c), 1.138629436111989);
  c.mscale = 0.707;
  EXPECT_DOUBLE_EQ(diffattn::rope_attention_factor(c), 1.138629436111989);  // alone it counts for nothing
  c.mscale_all_dim = 1;
  c.factor = 40;
  EXPECT_DOUBLE_EQ(diffattn::rope_attention_factor(c), 0.9210423553163399);
  c.mscale = 1;
  EXPECT_EQ(diffattn::rope_attention_factor(c), 1);
  c.attention_factor = 1.25;
  EXPECT_EQ(diffattn::rope_attention_factor(c), 1.25);
  const table t(c, 0, 2, rope_style::half);
  EXPECT_EQ(t.cos[0], 1.25f);
  EXPECT_EQ(t.sin[32], static_cast<float>(1.25 * std::sin(1.0)));
  c.factor = 1;
  c.attention_factor = c.mscale = 0;
  EXPECT_EQ(diffattn::rope_attention_factor(c), 1);
  EXPECT_EQ(diffattn::yarn_mscale(0.5), 1);
}

TEST(RopeTable, ConfigErrors) {
  const auto refused = [](void (*change)(rope_config&)) {
    rope_config c = yarn(64, 10000, 4, 2048);
    EXPECT_EQ(diffattn::check(c), status::ok);
    change(c);
    float cos = -7, sin = -7;
    EXPECT_EQ(diffattn::fill_rope_table(c, 0, 1, &cos, &sin), diffattn::check(c));
    EXPECT_EQ(cos, -7);
    EXPECT_EQ(sin, -7);
    return diffattn::check(c) == status::rope_table;
  };
  EXPECT_EQ(diffattn::check(rope_config{}), status::rope_table);
  EXPECT_EQ(diffattn::check(plain(2)), status::ok);
  EXPECT_TRUE(refused([](rope_config& c) { c.width = 0; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.width = 63; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.width = -64; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.base = 1; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.base = inf; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.base = not_a_number; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.factor = 0.5; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.factor = inf; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.factor = not_a_number; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.original_positions = 0; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.sequence_length = -1; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.low_freq_factor = 0; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.high_freq_factor = c.low_freq_factor; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.high_freq_factor = inf; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.beta_slow = 0; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.beta_slow = 33; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.beta_fast = inf; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.attention_factor = -1; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.mscale = not_a_number; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.mscale_all_dim = -1; }));
  EXPECT_TRUE(refused([](rope_config& c) { c.scaling = static_cast<rope_scaling>(17); }));
}

TEST(RopeTable, FillErrors) {
  float cos = -7, sin = -7;
  const auto fill = [&](index_t first, index_t n) { return diffattn::fill_rope_table(plain(2), first, n, &cos, &sin); };
  EXPECT_EQ(fill(0, -1), status::rope_table);
  EXPECT_EQ(fill(0, std::numeric_limits<index_t>::max()), status::rope_table);
  EXPECT_EQ(fill(diffattn::max_rope_position, 1), status::rope_position);
  EXPECT_EQ(fill(-diffattn::max_rope_position - 1, 1), status::rope_position);
  EXPECT_EQ(fill(std::numeric_limits<index_t>::min(), 1), status::rope_position);
  EXPECT_EQ(diffattn::fill_rope_table(plain(2), 0, 1, nullptr, &sin), status::rope_table);
  EXPECT_EQ(diffattn::fill_rope_table(plain(2), 0, 1, &cos, nullptr), status::rope_table);
  EXPECT_EQ(diffattn::fill_rope_table(plain(2), 0, 0, nullptr, nullptr), status::ok);
  EXPECT_EQ(cos, -7);
  EXPECT_EQ(sin, -7);
  EXPECT_EQ(fill(diffattn::max_rope_position - 1, 1), status::ok);
}

// ---- rows

TEST(Rope, NotGivenUnlessSet) {
  EXPECT_FALSE(rope_view{}.is_given());
  rope_view r;
  r.width = 2;  // then the missing table is an error, not "no rotation"
  EXPECT_TRUE(r.is_given());
  EXPECT_EQ(diffattn::check(r, 2), status::rope_table);
  static_assert(std::is_trivially_copyable_v<rope_view>, "views are plain data");
}

TEST(Rope, HoldsExactlyItsPositions) {
  rope_view r;
  r.positions = 10;
  r.first_position = 5;
  EXPECT_TRUE(r.holds(5, 10));
  EXPECT_TRUE(r.holds(14, 1));
  EXPECT_FALSE(r.holds(4, 1));
  EXPECT_FALSE(r.holds(15, 1));
  EXPECT_FALSE(r.holds(6, 10));
  EXPECT_TRUE(r.holds(1000, 0));
  EXPECT_FALSE(r.holds(std::numeric_limits<index_t>::max(), 1));
  EXPECT_FALSE(r.holds(std::numeric_limits<index_t>::min(), std::numeric_limits<index_t>::max()));
}

template <class T>
struct RopeRow : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(RopeRow, types);

TYPED_TEST(RopeRow, ByHand) {
  const float cos[] = {0, 0.5f}, sin[] = {1, 0.25f};  // the first pair turns by a right angle
  const TypeParam x[] = {1, 2, 4, 8, 3};
  TypeParam y[5] = {};
  diffattn::rotate(rope_view{cos, sin, 1, 4, rope_style::interleaved, 0}, 0, x, 5, y);
  const TypeParam interleaved[] = {-2, 1, 0, 5, 3};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(y[i], interleaved[i]);
  diffattn::rotate(rope_view{cos, sin, 1, 4, rope_style::half, 0}, 0, x, 5, y);
  const TypeParam half[] = {-4, -1, 1, 4.5, 3};  // pairs (1, 4) and (2, 8)
  for (int i = 0; i < 5; ++i) EXPECT_EQ(y[i], half[i]);
}

TYPED_TEST(RopeRow, AgreesWithTheDefinition) {
  for (const rope_style style : styles)
    for (const index_t width : {2, 4, 6, 30, 62, 64, 66, 70, 128, 130, 256})
      for (const index_t rest : {0, 1, 7}) {
        const table t(plain(width), 100, 50, style);
        const auto x = random_row<TypeParam>(width + rest);
        for (const index_t position : {100, 101, 149}) {  // both ends of the table
          std::vector<TypeParam> y(x.size());
          diffattn::rotate(t.view, position, x.data(), width + rest, y.data());
          const auto want = naive(x, width, 10000, static_cast<double>(position), style);
          // Two products of at most 2, each with a rounded factor and a rounding; one sum.
          const double tolerance = 8 * double(std::numeric_limits<float>::epsilon());
          for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(double(y[i]), want[i], tolerance) << width << " " << i;
          for (index_t i = width; i < width + rest; ++i) EXPECT_EQ(y[std::size_t(i)], x[std::size_t(i)]);
        }
      }
}

TYPED_TEST(RopeRow, StylesArePermutations) {
  const index_t width = 96, pairs = width / 2;
  const table a(plain(width), 0, 40, rope_style::interleaved), b(plain(width), 0, 40, rope_style::half);
  const auto x = random_row<TypeParam>(width);
  std::vector<TypeParam> permuted(x.size()), y(x.size()), z(x.size());
  const auto interleaved = [&](index_t i) { return static_cast<std::size_t>(i < pairs ? 2 * i : 2 * (i - pairs) + 1); };
  for (index_t i = 0; i < width; ++i) permuted[std::size_t(i)] = x[interleaved(i)];
  diffattn::rotate(a.view, 37, x.data(), width, y.data());
  diffattn::rotate(b.view, 37, permuted.data(), width, z.data());
  for (index_t i = 0; i < width; ++i) EXPECT_EQ(z[std::size_t(i)], y[interleaved(i)]);
}

TYPED_TEST(RopeRow, InPlaceIsTheSame) {
  for (const rope_style style : styles)
    for (const index_t width : {2, 6, 62, 64, 66, 130, 200}) {
      const table t(plain(width), 0, 20, style);
      auto x = random_row<TypeParam>(width + 3);
      std::vector<TypeParam> y(x.size());
      diffattn::rotate(t.view, 19, x.data(), width + 3, y.data());
      diffattn::rotate(t.view, 19, x.data(), width + 3, x.data());
      EXPECT_EQ(x, y) << width;
    }
}

TYPED_TEST(RopeRow, AnyPartOfTheRowIsTheSame) {
  for (const rope_style style : styles)
    for (const index_t width : {2, 10, 36, 64, 100}) {
      const index_t head = width + 5;
      const table t(plain(width), 0, 20, style);
      const auto x = random_row<TypeParam>(head);
      std::vector<TypeParam> whole(x.size());
      diffattn::rotate(t.view, 13, x.data(), head, whole.data());
      for (index_t i = 0; i <= head; ++i)
        for (index_t n = 0; i + n <= head; ++n) {
          std::vector<TypeParam> part(static_cast<std::size_t>(n) + 1, TypeParam(-7));
          diffattn::rotated_channels(t.view, 13, x.data(), i, n, part.data());
          EXPECT_TRUE(std::equal(part.begin(), part.end() - 1, whole.begin() + i)) << width << " " << i << " " << n;
          EXPECT_EQ(part.back(), TypeParam(-7));
        }
    }
}

TYPED_TEST(RopeRow, PartsInFloat) {
  const table t(plain(64), 0, 20, rope_style::half);
  const auto x = random_row<TypeParam>(64);
  std::vector<TypeParam> whole(64);
  std::vector<float> part(32);
  diffattn::rotate(t.view, 7, x.data(), 64, whole.data());
  diffattn::rotated_channels(t.view, 7, x.data(), 16, 32, part.data());
  for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(part[i], static_cast<float>(whole[i + 16]));
}

TYPED_TEST(RopeRow, KeepsTheNorm) {
  const table t(plain(128), 0, 5000, rope_style::half);
  const auto x = random_row<TypeParam>(128);
  const auto square = [](const std::vector<TypeParam>& v) {
    double sum = 0;
    for (const TypeParam a : v) sum += double(a) * double(a);
    return sum;
  };
  for (const index_t position : {0, 1, 777, 4999}) {
    std::vector<TypeParam> y(128);
    diffattn::rotate(t.view, position, x.data(), 128, y.data());
    EXPECT_NEAR(square(y) / square(x), 1, 5e-7);
    if (position == 0) {
      EXPECT_EQ(y, x);
    }
  }
}

TYPED_TEST(RopeRow, ScoresDependOnTheDistanceOnly) {
  const auto q = random_row<TypeParam>(64, 1), k = random_row<TypeParam>(64, 2);
  for (const rope_style style : styles) {
    const table t(plain(64), -10, 4010, style);
    const auto score = [&](index_t at, index_t other) {
      std::vector<TypeParam> a(64), b(64);
      diffattn::rotate(t.view, at, q.data(), 64, a.data());
      diffattn::rotate(t.view, other, k.data(), 64, b.data());
      double sum = 0;
      for (std::size_t i = 0; i < 64; ++i) sum += double(a[i]) * double(b[i]);
      return sum;
    };
    for (const index_t shift : {-10, 1, 100, 3900}) EXPECT_NEAR(score(40 + shift, 7 + shift), score(40, 7), 2e-5);
    EXPECT_GT(std::abs(score(41, 7) - score(40, 7)), 1e-2);
  }
}

TYPED_TEST(RopeRow, NanStaysInItsPair) {
  for (const rope_style style : styles) {
    const table t(plain(70), 0, 4, style);
    for (index_t bad = 0; bad < 73; ++bad) {
      auto x = random_row<TypeParam>(73);
      x[std::size_t(bad)] = std::numeric_limits<TypeParam>::quiet_NaN();
      const index_t partner = bad >= 70 ? bad : style == rope_style::half ? (bad + 35) % 70 : bad ^ 1;
      diffattn::rotate(t.view, 3, x.data(), 73, x.data());
      for (index_t i = 0; i < 73; ++i) EXPECT_EQ(std::isnan(x[std::size_t(i)]), i == bad || i == partner) << bad << " " << i;
    }
  }
}

// ---- tensors

template <class T>
struct RopeTensor : testing::Test {
  static constexpr index_t batch = 2, tokens = 3, heads = 2, width = 10, turned = 6;
  table turns{plain(turned), 5, 20, rope_style::half};
  std::vector<T> input = random_row<T>(batch * tokens * heads * width), output = std::vector<T>(input.size(), T(-7));

  diffattn::tensor_view<const T> from(diffattn::layout order = diffattn::layout::bthd) const {
    return diffattn::view(input.data(), batch, tokens, heads, width, order);
  }
  diffattn::tensor_view<T> to(diffattn::layout order = diffattn::layout::bthd) {
    return diffattn::view(output.data(), batch, tokens, heads, width, order);
  }
  bool untouched() const {
    return std::all_of(output.begin(), output.end(), [](T x) { return x == T(-7); });
  }
  /// out holds what rows rotated one by one are.
  void expect_rotated(diffattn::tensor_view<const T> source, diffattn::tensor_view<const T> result, const index_t* positions) {
    for (index_t b = 0; b < batch; ++b)
      for (index_t t = 0; t < tokens; ++t)
        for (index_t h = 0; h < heads; ++h) {
          T want[width];
          diffattn::rotate(turns.view, positions[b] + t, source.at(b, t, h), width, want);
          EXPECT_TRUE(std::equal(want, want + width, result.at(b, t, h))) << b << " " << t << " " << h;
        }
  }
};
TYPED_TEST_SUITE(RopeTensor, types);

TYPED_TEST(RopeTensor, EveryTokenHasItsPosition) {
  const index_t positions[] = {9, 9};
  EXPECT_EQ(diffattn::rotate(this->turns.view, this->from(), this->to(), 9), status::ok);
  this->expect_rotated(this->from(), this->to(), positions);
}

TYPED_TEST(RopeTensor, EveryEntryHasItsPosition) {
  const index_t positions[] = {22, 5};  // the last and the first that the table holds
  EXPECT_EQ(diffattn::rotate(this->turns.view, this->from(), this->to(), 0, positions), status::ok);
  this->expect_rotated(this->from(), this->to(), positions);
  const index_t before[] = {20, 3};
  EXPECT_EQ(diffattn::rotate(this->turns.view, this->from(), this->to(), 2, before), status::ok);
  this->expect_rotated(this->from(), this->to(), positions);
}

TYPED_TEST(RopeTensor, AnyStridesAndInPlace) {
  using diffattn::layout;
  const index_t positions[] = {11, 11};
  EXPECT_EQ(diffattn::rotate(this->turns.view, this->from(layout::bhtd), this->to(layout::bthd), 11), status::ok);
  this->expect_rotated(this->from(layout::bhtd), this->to(layout::bthd), positions);
  this->output = this->input;
  EXPECT_EQ(diffattn::rotate(this->turns.view, this->to(), this->to(), 11), status::ok);  // a mutable view is a source, too
  this->expect_rotated(this->from(), this->to(), positions);
  auto shared = this->from();  // one head for all: fine for a source
  shared.head_stride = 0;
  EXPECT_EQ(diffattn::rotate(this->turns.view, shared, this->to(), 11), status::ok);
  this->expect_rotated(shared, this->to(), positions);
}

TYPED_TEST(RopeTensor, Empty) {
  auto in = this->from();
  auto out = this->to();
  in.tokens = out.tokens = 0;
  in.data = nullptr;
  out.data = nullptr;
  EXPECT_EQ(diffattn::rotate(this->turns.view, in, out, 1000), status::ok);
}

TYPED_TEST(RopeTensor, ErrorsWriteNothing) {
  using T = TypeParam;
  const rope_view good = this->turns.view;
  const auto table_error = [&](auto change) {
    rope_view r = good;
    change(r);
    return diffattn::rotate(r, this->from(), this->to(), 9);
  };
  EXPECT_EQ(table_error([](rope_view& r) { r = {}; }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.cos = nullptr; }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.sin = nullptr; }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.width = 5; }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.width = 0; }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.width = -2; }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.positions = -1; }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.positions = std::numeric_limits<index_t>::max(); }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.first_position = std::numeric_limits<index_t>::min(); }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.first_position = std::numeric_limits<index_t>::max(); }), status::rope_table);
  EXPECT_EQ(table_error([](rope_view& r) { r.width = 12; }), status::rope_width);
  EXPECT_EQ(table_error([](rope_view& r) { r.positions = 0; }), status::rope_position);

  const index_t last = std::numeric_limits<index_t>::max(), least = std::numeric_limits<index_t>::min();
  for (const index_t first : {index_t{4}, index_t{23}, index_t{-1}, last, least}) {
    EXPECT_EQ(diffattn::rotate(good, this->from(), this->to(), first), status::rope_position) << first;
    const index_t positions[] = {9, first};
    EXPECT_EQ(diffattn::rotate(good, this->from(), this->to(), 0, positions), status::rope_position) << first;
  }

  const auto shape_error = [&](auto change) {
    auto in = this->from();
    auto out = this->to();
    change(in, out);
    return diffattn::rotate(good, in, out, 9);
  };
  using source = diffattn::tensor_view<const T>&;
  using result = diffattn::tensor_view<T>&;
  EXPECT_EQ(shape_error([](source in, result) { in.data = nullptr; }), status::q_null);
  EXPECT_EQ(shape_error([](source, result out) { out.data = nullptr; }), status::out_null);
  EXPECT_EQ(shape_error([](source in, result) { in.batch = -1; }), status::q_size);
  EXPECT_EQ(shape_error([](source in, result) { in.tokens = -1; }), status::q_size);
  EXPECT_EQ(shape_error([](source in, result) { in.heads = -1; }), status::q_size);
  EXPECT_EQ(shape_error([](source in, result) { in.width = 0; }), status::q_size);
  EXPECT_EQ(shape_error([](source in, result) { in.width_stride = 2; }), status::q_width_stride);
  EXPECT_EQ(shape_error([](source, result out) { out.width_stride = 2; }), status::out_width_stride);
  EXPECT_EQ(shape_error([](source, result out) { out.batch = 1; }), status::out_batch);
  EXPECT_EQ(shape_error([](source, result out) { out.tokens = 2; }), status::out_tokens);
  EXPECT_EQ(shape_error([](source, result out) { out.heads = 1; }), status::out_heads);
  EXPECT_EQ(shape_error([](source, result out) { out.width = 8; }), status::out_width);
  EXPECT_EQ(shape_error([](source, result out) { out.batch_stride = 0; }), status::out_strides);
  EXPECT_EQ(shape_error([](source, result out) { out.token_stride = 0; }), status::out_strides);
  EXPECT_EQ(shape_error([](source, result out) { out.head_stride = 0; }), status::out_strides);
  EXPECT_TRUE(this->untouched());
}

}  // namespace
