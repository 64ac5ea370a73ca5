// SPDX-License-Identifier: MIT
// Against the reference, over single axes and over random combinations; then the promises that need no reference.

#include <gtest/gtest.h>

#include <functional>

#include "support/problem.hpp"

namespace {

using diffattn::index_t;
using diffattn::schedule_choice;
using diffattn::status;
using test::both_schedules;
using test::coefficient;
using test::family;
using test::name;
using test::problem;
using test::spec;

constexpr index_t lengths[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 197, 257};
constexpr index_t widths[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 33, 64, 80, 96, 127, 128, 256};

template <class T>
struct Forward : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Forward, types);

TYPED_TEST(Forward, Lengths) {
  for (const index_t n : lengths)
    for (const bool causal : {false, true}) {
      spec s;
      s.q_len = s.kv_len = n, s.d = 5, s.width = 6, s.causal = causal, s.norm = diffattn::norm_kind::rms;
      s.seed = static_cast<std::uint64_t>(n);
      problem<TypeParam>(s).verify();
    }
}

TYPED_TEST(Forward, QueriesUnlikeKeys) {
  for (const index_t q_len : std::initializer_list<index_t>{1, 2, 5, 8, 16, 17, 33, 65})
    for (const index_t kv_len : std::initializer_list<index_t>{0, 1, 2, 31, 32, 33, 127, 128, 129, 160, 161, 300})
      for (const bool causal : {false, true}) {
        spec s;
        s.q_len = q_len, s.kv_len = kv_len, s.d = 4, s.width = 3, s.causal = causal;
        problem<TypeParam>(s).verify();
      }
}

// Long contexts are cut into larger blocks of rows.
TYPED_TEST(Forward, LongContexts) {
  for (const index_t kv_len : std::initializer_list<index_t>{2047, 4097, 8193, 16500})
    for (const index_t q_len : std::initializer_list<index_t>{1, 33, 130})
      for (const index_t window : {diffattn::attention_mask::unlimited, index_t{150}}) {
        spec s;
        s.q_len = q_len, s.kv_len = kv_len, s.d = 2, s.width = 3, s.causal = true, s.window = window;
        s.norm = diffattn::norm_kind::rms, s.raw = q_len == 33;
        problem<TypeParam>(s).verify();
      }
  // Keys and values beyond 16 MiB: a block of 64 rows and one of 33.
  spec s;
  s.q_len = 97, s.kv_len = 9001, s.d = 130, s.width = 211, s.causal = true, s.norm = diffattn::norm_kind::rms;
  problem<TypeParam>(s).verify();
}

// The stream schedule cuts keys into parts of 1024 tokens, counted from token 0.
TYPED_TEST(Forward, PartsOfTheKeys) {
  for (const index_t kv_len : std::initializer_list<index_t>{1023, 1024, 1025, 2048, 2049, 3105})
    for (const index_t q_len : std::initializer_list<index_t>{1, 4})
      for (const index_t window : {diffattn::attention_mask::unlimited, index_t{1}, index_t{1024}, index_t{1030}}) {
        spec s;
        s.batch = 2, s.q_len = q_len, s.kv_len = kv_len, s.d = 3, s.width = 5, s.heads = 2, s.kv = 1;
        s.causal = true, s.window = window, s.norm = diffattn::norm_kind::rms, s.q_amplitude = 5;
        s.ranges = q_len == 4 && kv_len % 2 == 0, s.seed = static_cast<std::uint64_t>(kv_len);
        problem<TypeParam>(s).verify();
      }
}

TYPED_TEST(Forward, Widths) {
  for (const index_t d : widths)
    for (const index_t width : widths) {
      spec s;
      s.q_len = 3, s.kv_len = 37, s.d = d, s.width = width, s.norm = diffattn::norm_kind::rms, s.weight = true;
      s.seed = static_cast<std::uint64_t>(d * 1000 + width);
      problem<TypeParam>(s).verify();
    }
  for (const index_t width : widths)
    for (const family f : {family::interleaved_adjacent, family::halves}) {
      spec s;
      s.q_len = 35, s.kv_len = 18, s.d = 3, s.width = width, s.heads_family = f, s.heads = 2, s.kv = 2;
      problem<TypeParam>(s).verify();
    }
}

TYPED_TEST(Forward, EveryHeadMap) {
  struct counts {
    index_t heads, kv, ratio;
  };
  for (const family f : test::all_families)
    for (const counts c : {counts{1, 1, 1}, counts{2, 1, 1}, counts{4, 2, 2}, counts{6, 3, 2}, counts{8, 2, 4},
                           counts{12, 3, 2}, counts{6, 6, 1}, counts{4, 8, 1}}) {
      if (f == family::table && c.heads != c.kv) continue;
      if (c.kv > c.heads && f != family::halves) continue;
      if ((f == family::grouped || f == family::grouped_wide || f == family::grouped_shared) && c.heads / c.ratio % c.kv != 0)
        continue;
      spec s;
      s.batch = 2, s.q_len = 9, s.kv_len = 11, s.d = 4, s.width = 5, s.causal = true;
      s.heads_family = f, s.heads = c.heads, s.kv = c.kv, s.ratio = c.ratio, s.norm = diffattn::norm_kind::rms;
      problem<TypeParam>(s).verify();
    }
}

TYPED_TEST(Forward, MasksAtEveryPlace) {
  for (const index_t q_len : std::initializer_list<index_t>{1, 3, 16, 33, 70})
    for (const index_t kv_len : std::initializer_list<index_t>{1, 31, 33, 129, 200})
      for (const index_t offset : {index_t{-40}, index_t{-3}, index_t{0}, index_t{1}, index_t{100}, index_t{1000},
                                   diffattn::attention_mask::align_to_end})
        for (const index_t window :
             {diffattn::attention_mask::unlimited, index_t{1}, index_t{2}, index_t{31}, index_t{128}, index_t{500}}) {
          spec s;
          s.q_len = q_len, s.kv_len = kv_len, s.d = 2, s.width = 2, s.raw = false;
          s.causal = true, s.offset = offset, s.window = window;
          s.ranges = (q_len + window) % 2 == 0;
          s.seed = static_cast<std::uint64_t>(q_len * 7 + kv_len);
          problem<TypeParam>(s).verify();
          if (testing::Test::HasFailure()) return;
        }
}

// A window as large as an integer can be is no window, also for rows before the first key.
TYPED_TEST(Forward, LargestWindow) {
  for (const index_t offset : {index_t{-5}, index_t{0}, index_t{3}}) {
    spec s;
    s.q_len = 12, s.kv_len = 9, s.causal = true, s.offset = offset, s.window = std::numeric_limits<index_t>::max();
    problem<TypeParam> p(s);
    problem<TypeParam> plain([&s] {
      spec unlimited = s;
      unlimited.window = diffattn::attention_mask::unlimited;
      return unlimited;
    }());
    for (const schedule_choice schedule : both_schedules) {
      p.args().schedule = plain.args().schedule = schedule;
      ASSERT_EQ(test::run(p.args()), status::ok);
      ASSERT_EQ(test::run(plain.args()), status::ok);
      EXPECT_TRUE(identical(p.out.values(), plain.out.values(), p.shape())) << s.text();
    }
  }
}

TYPED_TEST(Forward, KeyRanges) {
  for (const diffattn::key_range range :
       {diffattn::key_range{0, 0}, diffattn::key_range{150, 150}, diffattn::key_range{0, 1}, diffattn::key_range{149, 150},
        diffattn::key_range{3, 149}, diffattn::key_range{33, 64}, diffattn::key_range{127, 129}, diffattn::key_range{128, 150}})
    for (const bool causal : {false, true}) {
      spec s;
      s.q_len = 150, s.kv_len = 150, s.d = 3, s.width = 4, s.ranges = true, s.causal = causal;
      problem<TypeParam> p(s);
      p.ranges()[0] = range;
      p.verify();
    }
}

TYPED_TEST(Forward, CoefficientsAndNorms) {
  using diffattn::norm_kind;
  for (const coefficient lambda : {coefficient::number, coefficient::per_head, coefficient::per_token, coefficient::gate})
    for (const coefficient alpha : {coefficient::number, coefficient::per_head, coefficient::per_token, coefficient::gate})
      for (const norm_kind kind : {norm_kind::none, norm_kind::rms, norm_kind::group})
        for (const bool affine : {false, true}) {
          spec s;
          s.batch = 2, s.q_len = 18, s.kv_len = 21, s.d = 4, s.width = 6, s.heads = 3, s.kv = 3;
          s.lambda = lambda, s.alpha = alpha, s.alpha_value = 1.25, s.norm = kind;
          s.weight = affine, s.bias = affine && kind == norm_kind::group, s.gain = affine ? 0.3 : 1;
          problem<TypeParam>(s).verify();
        }
  for (const double value : {-3.0, -0.5, 0.0, 1.0, 2.0, 1e-30, 1e30})
    for (const double alpha : {1.0, 0.0, -2.0, 1e-30, 1e30}) {
      spec s;
      s.lambda_value = value, s.alpha_value = alpha, s.q_len = 5, s.kv_len = 40;
      problem<TypeParam>(s).verify();
    }
}

TYPED_TEST(Forward, Layouts) {
  using diffattn::layout;
  for (const layout q : {layout::bthd, layout::bhtd})
    for (const layout kv : {layout::bthd, layout::bhtd})
      for (const layout out : {layout::bthd, layout::bhtd})
        for (const index_t gap : {index_t{0}, index_t{3}})
          for (const bool one_head : {false, true}) {
            spec s;
            s.batch = 3, s.q_len = 19, s.kv_len = 23, s.d = 9, s.width = 7, s.heads = 4, s.kv = 2;
            s.q_order = q, s.kv_order = kv, s.out_order = out, s.gap = gap, s.one_kv_head = one_head;
            problem<TypeParam>(s).verify();
          }
}

TYPED_TEST(Forward, RandomCombinations) {
  test::random_source random(20240607);
  for (int sample = 0; sample < (sizeof(TypeParam) == 4 ? 400 : 250); ++sample) {
    spec s;
    s.seed = static_cast<std::uint64_t>(sample + 1);
    s.batch = random.integer(1, 3);
    s.heads_family = test::all_families[random.integer(0, 10)];
    s.ratio = random.integer(1, 3), s.kv = random.integer(1, 3);
    s.heads = s.kv * s.ratio * random.integer(1, 2);
    if (s.heads_family == family::table) s.kv = s.heads;
    do {
      s.q_len = lengths[random.integer(0, 18)], s.kv_len = lengths[random.integer(0, 18)];
      s.d = widths[random.integer(0, 16)], s.width = widths[random.integer(0, 16)];
    } while (s.batch * s.q_len * s.kv_len * s.heads * (2 * s.d + 4 * s.width + 40) > 3'000'000);
    const auto order = [&] { return random.coin() ? diffattn::layout::bthd : diffattn::layout::bhtd; };
    s.q_order = order(), s.kv_order = order(), s.out_order = order();
    s.gap = random.pick<index_t>({0, 1, 8}), s.one_kv_head = random.integer(0, 9) == 0;
    s.causal = random.coin();
    if (s.causal && random.coin()) s.offset = random.integer(-s.q_len, s.kv_len + 5);
    if (s.causal && random.coin()) s.window = random.pick<index_t>({1, 2, 16, 33, 128, 1000});
    s.ranges = random.integer(0, 3) == 0;
    const auto kind = [&] {
      return random.pick<coefficient>({coefficient::number, coefficient::per_head, coefficient::per_token, coefficient::gate});
    };
    s.lambda = kind(), s.alpha = random.coin() ? coefficient::number : kind();
    s.norm =
        random.pick<diffattn::norm_kind>({diffattn::norm_kind::none, diffattn::norm_kind::rms, diffattn::norm_kind::group});
    s.weight = random.coin(), s.bias = s.norm == diffattn::norm_kind::group && random.coin();
    s.gain = random.pick<double>({1, 0.2, -1.5});
    s.scale = random.pick<double>({0, 0.1, 1});
    s.lse = random.coin(), s.raw = random.coin();
    s.q_amplitude = random.pick<double>({0.1, 1, 10}), s.v_amplitude = random.pick<double>({1e-3, 1, 100});
    problem<TypeParam>(s).verify();
  }
}

TYPED_TEST(Forward, LargeLogitsKeepTheLastShift) {
  // Scores that grow with the key raise the shift again and again; scores that fall never do. In steps of 7 no two
  // neighbours are lost beside each other.
  for (const double step : {7.0, -7.0, 40.0, 1000.0})
    for (const index_t q_len : std::initializer_list<index_t>{1, 40}) {
      spec s;
      s.q_len = q_len, s.kv_len = 200, s.d = 1, s.width = 3, s.scale = 1;
      problem<TypeParam> p(s);
      p.q.for_each([](TypeParam& x) { x = 1; });
      for (index_t h = 0; h < 2; ++h)
        for (index_t j = 0; j < s.kv_len; ++j)
          p.k.at(0, j, h, 0) = static_cast<TypeParam>(step * static_cast<double>(h == 0 ? j : s.kv_len - j) / 4);
      p.verify();
    }
  for (const double size : {1e3, 1e5}) {
    spec s;
    s.q_len = 33, s.kv_len = 140, s.d = 1, s.width = 3, s.scale = 1, s.q_amplitude = size;
    problem<TypeParam>(s).verify();
  }
}

TYPED_TEST(Forward, LargeValues) {
  for (const double size : {1e-30, 1e15, 1e30}) {
    spec s;
    s.q_len = 17, s.kv_len = 140, s.width = 5, s.v_amplitude = size;
    problem<TypeParam>(s).verify();
    s.norm = diffattn::norm_kind::rms;  // squares of 1e30 do not fit a float
    problem<TypeParam>(s).verify();
    s.norm = diffattn::norm_kind::group;
    problem<TypeParam>(s).verify();
  }
}

// A norm without eps makes any output as large as any other.
TYPED_TEST(Forward, SmallValuesWithoutEps) {
  for (const double size :
       sizeof(TypeParam) == 4 ? std::vector<double>{1e-18, 1e-21, 1e-30} : std::vector<double>{1e-140, 1e-150})
    for (const auto kind : {diffattn::norm_kind::rms, diffattn::norm_kind::group}) {
      spec s;
      s.q_len = 17, s.kv_len = 40, s.width = 5, s.v_amplitude = size, s.norm = kind, s.eps = 0;
      problem<TypeParam>(s).verify();
    }
}

TYPED_TEST(Forward, NearCancellation) {
  for (const double difference : {1e-2, 1e-4, 1e-6}) {
    spec s;
    s.q_len = 20, s.kv_len = 50, s.lambda_value = 1, s.norm = diffattn::norm_kind::rms;
    problem<TypeParam> p(s);
    for (index_t t = 0; t < s.q_len; ++t)
      for (index_t c = 0; c < s.d; ++c) p.q.at(0, t, 1, c) = p.q.at(0, t, 0, c);
    for (index_t t = 0; t < s.kv_len; ++t)
      for (index_t c = 0; c < s.d; ++c)
        p.k.at(0, t, 1, c) = static_cast<TypeParam>(double(p.k.at(0, t, 0, c)) * (1 + difference * double(t % 3)));
    p.verify();
  }
}

// Also if the maximum rises from one part of the keys to the next.
TYPED_TEST(Forward, EqualMapsCancelExactly) {
  for (const schedule_choice schedule : both_schedules)
    for (const index_t kv_len : std::initializer_list<index_t>{133, 1025, 2100})
      for (const diffattn::norm_kind kind : {diffattn::norm_kind::none, diffattn::norm_kind::rms, diffattn::norm_kind::group})
        for (const double factor : {1.0, 0.3, -2.0}) {
          spec s;
          s.q_len = kv_len == 133 ? 37 : 3, s.kv_len = kv_len, s.causal = true, s.lambda_value = s.alpha_value = factor,
          s.norm = kind, s.raw = false;
          problem<TypeParam> p(s);
          for (index_t c = 0; c < s.d; ++c) {
            for (index_t t = 0; t < s.q_len; ++t) p.q.at(0, t, 1, c) = p.q.at(0, t, 0, c);
            for (index_t t = 0; t < s.kv_len; ++t) {
              p.k.at(0, t, 0, c) *= static_cast<TypeParam>(1 + double(t) / 100);
              p.k.at(0, t, 1, c) = p.k.at(0, t, 0, c);
            }
          }
          p.args().schedule = schedule;
          ASSERT_EQ(test::run(p.args()), status::ok);
          for (const TypeParam x : p.out.values()) ASSERT_EQ(x, TypeParam(0)) << name(schedule) << ", " << kv_len << " keys";
        }
}

TYPED_TEST(Forward, OutDoesNotDependOnOptionalOutputs) {
  for (const schedule_choice schedule : both_schedules)
    for (const index_t q_len : std::initializer_list<index_t>{5, 40}) {
      std::vector<TypeParam> first;
      for (const bool lse : {false, true})
        for (const bool raw : {false, true}) {
          spec s;
          s.batch = 2, s.q_len = q_len, s.kv_len = 150, s.width = 9, s.heads = 2, s.kv = 1, s.causal = true, s.window = 60;
          s.norm = diffattn::norm_kind::rms, s.lse = lse, s.raw = raw, s.q_amplitude = 20;
          problem<TypeParam> p(s);
          p.args().schedule = schedule;
          ASSERT_EQ(test::run(p.args()), status::ok);
          if (first.empty()) first = p.out.values();
          EXPECT_TRUE(identical(p.out.values(), first, p.shape())) << name(schedule) << ", lse " << lse << ", raw " << raw;
        }
    }
}

// Documented in forward.hpp: by the rows that share values.
TEST(Schedule, AutomaticGoesByShape) {
  struct shape {
    index_t q_len, heads, kv;
    schedule_choice chosen;
  };
  for (const shape c : {shape{1, 4, 4, schedule_choice::stream}, shape{8, 4, 4, schedule_choice::stream},
                        shape{9, 4, 4, schedule_choice::panels}, shape{8, 8, 2, schedule_choice::stream},
                        shape{9, 8, 2, schedule_choice::panels}, shape{1, 33, 1, schedule_choice::stream}}) {
    spec s;
    s.q_len = c.q_len, s.heads = c.heads, s.kv = c.kv, s.kv_len = 1100;
    problem<float> p(s);
    const std::size_t bytes = test::workspace_bytes(p.args());
    ASSERT_EQ(test::run(p.args()), status::ok);
    const auto automatic = p.outputs();
    p.args().schedule = c.chosen;
    EXPECT_EQ(bytes, test::workspace_bytes(p.args())) << s.text();
    ASSERT_EQ(test::run(p.args()), status::ok);
    p.expect_identical(p.outputs(), automatic);
  }
}

/// Runs `part` rows at a time, each batch entry alone, with the mask's offset moved along.
template <class T>
void expect_same_in_parts(const spec& s, index_t part, schedule_choice schedule) {
  SCOPED_TRACE(s.text() + ", " + std::to_string(part) + " rows a call, " + name(schedule));
  problem<T> whole(s), parts(s);
  whole.args().schedule = parts.args().schedule = schedule;
  ASSERT_EQ(test::run(whole.args()), status::ok);
  const index_t offset = s.offset == diffattn::attention_mask::align_to_end ? s.kv_len - s.q_len : s.offset;
  for (index_t b = 0; b < s.batch; ++b)
    for (index_t row = 0; row < s.q_len; row += part) {
      diffattn::forward_args<T> a = parts.args();
      const auto cut = [&](auto view) {
        view.data = view.at(b, row, 0), view.batch = 1, view.tokens = std::min(part, s.q_len - row);
        return view;
      };
      const auto one = [b](auto view) {
        view.data = view.at(b, 0, 0), view.batch = 1;
        return view;
      };
      a.q = cut(a.q), a.out = cut(a.out), a.out1 = cut(a.out1), a.out2 = cut(a.out2), a.k = one(a.k), a.v = one(a.v);
      a.lse1.data = &a.lse1.at(b, row, 0), a.lse2.data = &a.lse2.at(b, row, 0);
      if (auto array = a.lambda.array(); array.data) {
        array.data = &array.at(b, row, 0);
        a.lambda = diffattn::lambda_view<T>::strided(array);
      }
      if (a.mask.causal) a.mask.offset = offset + row;
      if (a.mask.key_ranges) a.mask.key_ranges += b;
      ASSERT_EQ(test::run(a), status::ok);
    }
  whole.expect_identical(parts.outputs(), whole.outputs());
}

// Row 0 of a causal square sees one key: both maps are exactly [1], whatever their scores.
TYPED_TEST(Forward, SingleKeysCancelExactly) {
  using T = TypeParam;
  test::random_source random(11);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::vector<T> q(2 * 3), k(2 * 3), v(5), out(5, T(7));
    for (auto* x : {&q, &k, &v})
      for (T& e : *x) e = static_cast<T>(9 * random.normal());
    diffattn::forward_args<T> a;
    a.q = diffattn::view<const T>(q.data(), 1, 1, 2, 3), a.k = diffattn::view<const T>(k.data(), 1, 1, 2, 3);
    a.v = diffattn::view<const T>(v.data(), 1, 1, 1, 5), a.out = diffattn::view(out.data(), 1, 1, 1, 5);
    a.heads = diffattn::head_map::interleaved(1, 1), a.lambda = T(1), a.norm.eps = T(0);
    for (const schedule_choice schedule : both_schedules) {
      a.schedule = schedule;
      ASSERT_EQ(test::run(a), status::ok);
      for (const T x : out) EXPECT_EQ(x, T(0)) << name(schedule);
    }
  }
}

TYPED_TEST(Forward, RowsDoNotDependOnTheirNeighbours) {
  test::random_source random(5);
  for (const index_t part : std::initializer_list<index_t>{1, 2, 5, 8, 16, 17, 32})
    for (const bool causal : {false, true})
      for (const index_t window : {diffattn::attention_mask::unlimited, index_t{20}, index_t{50}}) {
        if (!causal && window > 0) continue;
        spec s;
        s.batch = 2, s.q_len = 70, s.kv_len = 197, s.d = 7, s.width = 6, s.heads = 2, s.kv = 1;
        s.causal = causal, s.window = window, s.ranges = random.coin(), s.q_amplitude = random.pick<double>({1, 30});
        s.lambda = coefficient::per_token, s.norm = diffattn::norm_kind::rms;
        for (const schedule_choice schedule : both_schedules) expect_same_in_parts<TypeParam>(s, part, schedule);
      }
}

/// Puts NaN and infinities wherever nobody may look, and compares with a run on clean data.
TYPED_TEST(Forward, MaskedKeysAreNeverRead) {
  using T = TypeParam;
  const T bad[] = {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(),
                   -std::numeric_limits<T>::infinity()};
  struct shape {
    index_t q_len, kv_len, offset, window, begin, end;
  };
  const index_t none = diffattn::attention_mask::unlimited;
  for (const shape c : {shape{1, 33, 0, 1, 0, 33}, shape{5, 40, 10, none, 0, 40}, shape{40, 40, 0, none, 0, 40},
                        shape{40, 300, 100, 7, 0, 300}, shape{33, 300, 260, 40, 131, 270}, shape{70, 129, 59, none, 31, 128},
                        shape{20, 64, 44, none, 33, 33}, shape{3, 260, 0, none, 2, 250}, shape{2, 2100, 1500, 300, 0, 2100}}) {
    spec s;
    s.q_len = c.q_len, s.kv_len = c.kv_len, s.causal = true, s.offset = c.offset, s.window = c.window, s.ranges = true,
    s.width = 19;
    problem<T> clean(s), dirty(s);
    clean.ranges()[0] = dirty.ranges()[0] = {c.begin, c.end};
    // A key that some row sees is live for that row; only what no row may see can be spoilt for all.
    const auto reference = clean.for_reference();
    int next = 0;
    for (index_t j = 0; j < c.kv_len; ++j) {
      bool live = false;
      for (index_t i = 0; i < c.q_len; ++i) live |= reference.allowed(0, i, j);
      if (live) continue;
      for (index_t h = 0; h < 2; ++h) dirty.k.at(0, j, h, next % s.d) = bad[next % 3], ++next;
      dirty.v.at(0, j, 0, next % s.width) = bad[next % 3];
    }
    SCOPED_TRACE(s.text());
    for (const schedule_choice schedule : both_schedules) {
      clean.args().schedule = dirty.args().schedule = schedule;
      ASSERT_EQ(test::run(clean.args()), status::ok);
      ASSERT_EQ(test::run(dirty.args()), status::ok);
      clean.expect_identical(dirty.outputs(), clean.outputs());
    }
    dirty.verify();
  }
}

/// NaN and infinities that some rows see and others do not: the reference knows which.
TYPED_TEST(Forward, LiveNanReachesItsRowsOnly) {
  using T = TypeParam;
  test::random_source random(11);
  for (int sample = 0; sample < 400; ++sample) {
    spec s;
    s.seed = static_cast<std::uint64_t>(sample);
    s.batch = 2, s.q_len = random.pick<index_t>({1, 9, 40, 70}), s.kv_len = random.pick<index_t>({5, 33, 130, 200});
    s.heads = 2, s.kv = 1, s.width = random.pick<index_t>({1, 5, 16, 40}), s.causal = sample % 4 != 0,
    s.ranges = sample % 3 == 0;
    if (s.causal && random.coin()) s.window = random.pick<index_t>({1, 5, 40});
    s.norm = sample % 2 == 0 ? diffattn::norm_kind::none : diffattn::norm_kind::rms;
    problem<T> p(s);
    for (int i = 0; i < 3; ++i) {
      const T bad = random.pick<T>({std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()});
      test::tensor<T>& t = *random.pick<test::tensor<T>*>({&p.q, &p.k, &p.v});
      t.at(random.integer(0, 1), random.integer(0, t.view().tokens - 1), random.integer(0, t.view().heads - 1),
           random.integer(0, t.view().width - 1)) = bad;
    }
    p.verify();
  }
}

TYPED_TEST(Forward, NanInCoefficientsReachesItsRowsOnly) {
  spec s;
  s.q_len = 40, s.kv_len = 40, s.heads = 2, s.kv = 2, s.lambda = coefficient::per_token;
  problem<TypeParam> p(s);
  p.lambdas()[21] = std::numeric_limits<TypeParam>::quiet_NaN();
  p.verify();
}

TYPED_TEST(Forward, NothingToDo) {
  for (const index_t batch : std::initializer_list<index_t>{0, 1})
    for (const index_t q_len : std::initializer_list<index_t>{0, 3})
      for (const index_t kv_len : std::initializer_list<index_t>{0, 5}) {
        spec s;
        s.batch = batch, s.q_len = q_len, s.kv_len = kv_len, s.norm = diffattn::norm_kind::rms;
        problem<TypeParam>(s).verify();
      }
}

}  // namespace
