// SPDX-License-Identifier: MIT
// Standard attention, against the reference with one map, and bit for bit against differential attention with λ = 0.

#include <gtest/gtest.h>

#include "support/problem.hpp"

namespace {

using diffattn::index_t;
using diffattn::schedule_choice;
using diffattn::status;
using test::both_schedules;
using test::name;
using test::problem;
using test::spec;

/// The arguments of standard attention on the first of the two maps of `p`, whose heads are interleaved: every second head.
template <class T>
diffattn::attention_args<T> first_map(problem<T>& p, const diffattn::tensor_view<T>& out, diffattn::token_head_view<T> lse) {
  const diffattn::forward_args<T>& f = p.args();
  diffattn::attention_args<T> a;
  const auto every_second = [](auto view) {
    view.heads /= 2, view.head_stride *= 2;
    return view;
  };
  a.q = every_second(f.q), a.k = every_second(f.k), a.v = f.v, a.out = out, a.mask = f.mask, a.scale = f.scale, a.lse = lse;
  a.schedule = f.schedule;
  return a;
}

template <class T>
struct Attention : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Attention, types);

template <class T>
void verify(const spec& s, schedule_choice schedule) {
  SCOPED_TRACE(s.text() + ", " + name(schedule));
  problem<T> p(s);
  p.args().schedule = schedule;
  const diffattn::attention_args<T> a = first_map(p, p.out.view(), p.args().lse1);
  ASSERT_EQ(test::run(a), status::ok);
  const reference::result r = reference::attention(p.for_reference());
  EXPECT_TRUE(compare(p.out.values(), r.av[0].value, p.tolerance(r.av[0]), p.shape())) << "out";
  EXPECT_TRUE(compare(p.lse1.values(), r.lse[0].value, p.tolerance(r.lse[0]), p.row_shape())) << "lse";
  const std::vector<T> out = p.out.values(), lse = p.lse1.values();
  EXPECT_TRUE(p.out.gaps_untouched());
  EXPECT_TRUE(p.lse1.gaps_untouched());

  spec no_second = s;
  no_second.lambda_value = 0, no_second.raw = false;
  problem<T> differential(no_second);
  differential.args().schedule = schedule;
  ASSERT_EQ(test::run(differential.args()), status::ok);
  EXPECT_TRUE(identical(differential.out.values(), out, p.shape())) << "forward with lambda 0";
  EXPECT_TRUE(identical(differential.lse1.values(), lse, p.row_shape())) << "forward with lambda 0";

  // From a cache of pages.
  diffattn::kv_cache_config config;
  config.heads = diffattn::head_map::single(a.k.heads, a.k.heads), config.key_width = s.d, config.value_width = s.width;
  config.keys = config.values = diffattn::storage_of<T>;
  config.kind = diffattn::kv_cache_kind::paged, config.sequences = s.batch, config.capacity = std::max(s.kv_len, index_t{1});
  test::owned_cache cache(config);
  std::vector<index_t> sequences;
  for (index_t b = 0; b < s.batch; ++b) sequences.push_back(b);
  cache.append_in_turns(sequences, a.k, a.v);
  diffattn::attention_args<T> cached = a;
  cached.k = cached.v = {}, cached.cache = cache->view();
  cached.cache.heads = {};  // made for any call
  ASSERT_EQ(test::run(cached), status::ok);
  EXPECT_TRUE(identical(p.out.values(), out, p.shape())) << "from a cache";
  EXPECT_TRUE(identical(p.lse1.values(), lse, p.row_shape())) << "from a cache";
}

template <class T>
void verify(const spec& s) {
  for (const schedule_choice schedule : both_schedules) verify<T>(s, schedule);
}

TYPED_TEST(Attention, Lengths) {
  for (const index_t n :
       std::initializer_list<index_t>{1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 197, 257})
    for (const bool causal : {false, true}) {
      spec s;
      s.q_len = s.kv_len = n, s.d = 5, s.width = 6, s.causal = causal;
      verify<TypeParam>(s);
    }
}

TYPED_TEST(Attention, Widths) {
  for (const index_t d : std::initializer_list<index_t>{1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 33, 64, 80, 96, 127, 128, 256})
    for (const index_t width : std::initializer_list<index_t>{1, 3, 4, 8, 9, 33, 64, 127}) {
      spec s;
      s.q_len = 35, s.kv_len = 20, s.d = d, s.width = width;
      verify<TypeParam>(s);
    }
}

TYPED_TEST(Attention, RandomCombinations) {
  test::random_source random(31);
  for (int sample = 0; sample < 200; ++sample) {
    spec s;
    s.seed = static_cast<std::uint64_t>(sample);
    s.batch = random.integer(1, 3), s.kv = random.integer(1, 3), s.heads = s.kv * random.integer(1, 3);
    s.q_len = random.pick<index_t>({1, 2, 15, 16, 17, 31, 33, 40, 70}),
    s.kv_len = random.pick<index_t>({0, 1, 2, 31, 33, 64, 129, 300});
    s.d = random.integer(1, 20), s.width = random.integer(1, 20);
    s.q_order = s.out_order = random.coin() ? diffattn::layout::bthd : diffattn::layout::bhtd;
    s.kv_order = random.coin() ? diffattn::layout::bthd : diffattn::layout::bhtd;
    s.causal = random.coin(), s.ranges = random.integer(0, 3) == 0;
    if (s.causal && random.coin()) s.offset = random.integer(-s.q_len, s.kv_len + 5);
    if (s.causal && random.coin()) s.window = random.pick<index_t>({1, 2, 16, 33, 128, 1000});
    s.scale = random.pick<double>({0, 0.1, 1}), s.q_amplitude = random.pick<double>({0.1, 1, 10, 100});
    verify<TypeParam>(s);
  }
}

TYPED_TEST(Attention, IncreasingScoresRescaleTheOutput) {
  for (const double step : {0.5, 4.0, 100.0}) {
    spec s;
    s.q_len = 40, s.kv_len = 400, s.d = 1, s.width = 5, s.scale = 1;
    problem<TypeParam> p(s);
    p.q.for_each([](TypeParam& x) { x = 1; });
    for (index_t j = 0; j < s.kv_len; ++j) p.k.at(0, j, 0, 0) = static_cast<TypeParam>(step * static_cast<double>(j));
    const reference::result r = reference::attention(p.for_reference());
    for (const schedule_choice schedule : both_schedules) {
      p.args().schedule = schedule;
      ASSERT_EQ(test::run(first_map(p, p.out.view(), p.args().lse1)), status::ok);
      EXPECT_TRUE(compare(p.out.values(), r.av[0].value, p.tolerance(r.av[0]), p.shape())) << name(schedule);
      EXPECT_TRUE(compare(p.lse1.values(), r.lse[0].value, p.tolerance(r.lse[0]), p.row_shape())) << name(schedule);
    }
  }
}

TYPED_TEST(Attention, MaskedAndLiveNan) {
  using T = TypeParam;
  test::random_source random(12);
  for (int sample = 0; sample < 200; ++sample) {
    spec s;
    s.seed = static_cast<std::uint64_t>(sample);
    s.q_len = random.pick<index_t>({1, 9, 40, 70}), s.kv_len = random.pick<index_t>({5, 33, 130, 200});
    s.causal = true, s.width = random.pick<index_t>({1, 5, 16, 40});
    if (random.coin()) s.window = random.pick<index_t>({1, 5, 40});
    problem<T> p(s);
    for (int i = 0; i < 3; ++i) {
      test::tensor<T>& t = *random.pick<test::tensor<T>*>({&p.k, &p.v});
      t.at(0, random.integer(0, s.kv_len - 1), 0, random.integer(0, t.view().width - 1)) =
          random.pick<T>({std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()});
    }
    const reference::result r = reference::attention(p.for_reference());
    for (const schedule_choice schedule : both_schedules) {
      p.args().schedule = schedule;
      ASSERT_EQ(test::run(first_map(p, p.out.view(), p.args().lse1)), status::ok);
      EXPECT_TRUE(compare(p.out.values(), r.av[0].value, p.tolerance(r.av[0]), p.shape())) << s.text() << name(schedule);
      EXPECT_TRUE(compare(p.lse1.values(), r.lse[0].value, p.tolerance(r.lse[0]), p.row_shape())) << s.text() << name(schedule);
    }
  }
}

TYPED_TEST(Attention, RowsDoNotDependOnTheirNeighbours) {
  for (const index_t part : std::initializer_list<index_t>{1, 3, 16, 17, 32})
    for (const index_t window : {diffattn::attention_mask::unlimited, index_t{45}})
      for (const schedule_choice schedule : both_schedules) {
        spec s;
        s.q_len = 70, s.kv_len = 197, s.d = 7, s.width = 6, s.causal = true, s.window = window;
        problem<TypeParam> whole(s), parts(s);
        whole.args().schedule = parts.args().schedule = schedule;
        ASSERT_EQ(test::run(first_map(whole, whole.out.view(), whole.args().lse1)), status::ok);
        for (index_t row = 0; row < s.q_len; row += part) {
          diffattn::attention_args<TypeParam> a = first_map(parts, parts.out.view(), parts.args().lse1);
          a.q.data = a.q.at(0, row, 0), a.out.data = a.out.at(0, row, 0), a.lse.data = &a.lse.at(0, row, 0);
          a.q.tokens = a.out.tokens = std::min(part, s.q_len - row);
          a.mask.offset = s.kv_len - s.q_len + row;
          ASSERT_EQ(test::run(a), status::ok);
        }
        EXPECT_TRUE(identical(parts.out.values(), whole.out.values(), whole.shape()))
            << name(schedule) << ", " << part << " rows, window " << window;
        EXPECT_TRUE(identical(parts.lse1.values(), whole.lse1.values(), whole.row_shape()))
            << name(schedule) << ", " << part << " rows, window " << window;
      }
}

TEST(AttentionArguments, NamesWhatIsWrong) {
  std::vector<float> data(64, 0.0f), out(64, 0.0f);
  diffattn::attention_args<float> a;
  EXPECT_EQ(test::check(a), status::q_size);
  a.q = diffattn::view<const float>(data.data(), 1, 2, 4, 2);
  a.k = a.v = diffattn::view<const float>(data.data(), 1, 2, 2, 2);
  a.out = diffattn::view(out.data(), 1, 2, 4, 2);
  EXPECT_EQ(test::check(a), status::ok);
  EXPECT_GT(test::workspace_bytes(a), 0u);
  a.k.heads = a.v.heads = 3;
  EXPECT_EQ(test::check(a), status::heads_kv_groups);
  EXPECT_EQ(test::workspace_bytes(a), 0u);
  a.k.heads = 2, a.v.heads = 1;
  EXPECT_EQ(test::check(a), status::v_heads);
  a.v.heads = 2, a.q.heads = 8;
  EXPECT_EQ(test::check(a), status::q_heads);
  a.q.heads = 4, a.out.width = 3;
  EXPECT_EQ(test::check(a), status::out_width);
}

}  // namespace
