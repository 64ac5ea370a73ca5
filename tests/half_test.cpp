// SPDX-License-Identifier: MIT
// Tensors of f16 and bf16: the call in float on the same numbers, its output rounded once, bit for bit.

#include <gtest/gtest.h>

#include <diffattn/eigen.hpp>
#include <vector>

#include "support/elements.hpp"
#include "support/problem.hpp"

namespace {

using diffattn::index_t;
using diffattn::schedule_choice;
using diffattn::status;
using test::both_schedules;
using test::element;
using test::name;
using test::problem;
using test::spec;

/// The tensors of a problem in T, its numbers rounded to T.
template <class T>
struct narrowed {
  explicit narrowed(problem<float>& p) : q(narrow(p.q)), k(narrow(p.k)), v(narrow(p.v)) {
    const auto& o = p.out.view();
    out.assign(static_cast<std::size_t>(o.batch * o.tokens * o.heads * o.width), element<T>(-77));
    out_view = diffattn::view(out.data(), o.batch, o.tokens, o.heads, o.width);
  }
  diffattn::tensor_view<const T> view(const std::vector<T>& t, const test::tensor<float>& like) const {
    const auto& l = like.view();
    return diffattn::view(t.data(), l.batch, l.tokens, l.heads, l.width);
  }
  void expect_rounded(const std::vector<float>& from) const {
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (std::isnan(test::number(out[i])) && std::isnan(from[i])) continue;
      ASSERT_EQ(out[i].bits, element<T>(double(from[i])).bits) << "element " << i << ", " << from[i];
    }
  }

  std::vector<T> q, k, v, out;
  diffattn::tensor_view<T> out_view;

 private:
  static std::vector<T> narrow(const test::tensor<float>& t) {
    std::vector<T> to;
    t.for_each([&to](float& x) {
      to.push_back(element<T>(double(x)));
      x = static_cast<float>(test::number(to.back()));
    });
    return to;
  }
};

template <class T>
struct Half : testing::Test {};
using types = testing::Types<diffattn::f16, diffattn::bf16>;
TYPED_TEST_SUITE(Half, types);

template <class T>
void verify(const spec& s) {
  SCOPED_TRACE(s.text());
  problem<float> p(s);
  narrowed<T> n(p);
  diffattn::forward_args<T> a;
  a.q = n.view(n.q, p.q), a.k = n.view(n.k, p.k), a.v = n.view(n.v, p.v), a.out = n.out_view;
  diffattn::forward_args<float>& f = p.args();
  a.heads = f.heads, a.lambda = f.lambda, a.alpha = f.alpha, a.norm = f.norm, a.mask = f.mask, a.scale = f.scale;
  a.lse1 = f.lse1, a.lse2 = f.lse2, a.out1 = f.out1, a.out2 = f.out2;
  for (const schedule_choice schedule : both_schedules) {
    f.schedule = schedule;
    ASSERT_EQ(test::run(f), status::ok);
    const problem<float>::results expected = p.outputs();
    test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
      if (way.schedule != schedule) return;
      std::fill(n.out.begin(), n.out.end(), element<T>(-77));
      ASSERT_EQ(test::run(way), status::ok);
      n.expect_rounded(expected.out);
      problem<float>::results results = p.outputs();
      results.out = expected.out;
      p.expect_identical(results, expected);
    });
  }
}

TYPED_TEST(Half, Shapes) {
  test::random_source random(61);
  for (int sample = 0; sample < 250; ++sample) {
    spec s;
    s.seed = static_cast<std::uint64_t>(sample);
    s.batch = random.integer(1, 2), s.heads_family = test::all_families[random.integer(0, 10)];
    s.ratio = random.integer(1, 2), s.kv = random.integer(1, 2), s.heads = s.kv * s.ratio * random.integer(1, 2);
    if (s.heads_family == test::family::table) s.kv = s.heads;
    s.q_len = random.pick<index_t>({1, 2, 3, 8, 17, 33, 70}), s.kv_len = random.pick<index_t>({0, 1, 2, 31, 33, 64, 129, 300});
    s.d = random.pick<index_t>({1, 3, 8, 16, 33, 64, 80}), s.width = random.pick<index_t>({1, 2, 7, 16, 31, 32, 48, 65});
    s.causal = random.coin(), s.ranges = random.integer(0, 3) == 0;
    if (s.causal && random.coin()) s.window = random.pick<index_t>({1, 2, 16, 33, 128});
    s.norm =
        random.pick<diffattn::norm_kind>({diffattn::norm_kind::none, diffattn::norm_kind::rms, diffattn::norm_kind::group});
    s.weight = random.coin(), s.lse = random.coin(), s.raw = random.coin();
    s.lambda = random.coin() ? test::coefficient::number : test::coefficient::gate;
    s.q_amplitude = random.pick<double>({1, 20}), s.v_amplitude = random.pick<double>({1e-6, 1, 300});
    verify<TypeParam>(s);
  }
}

TYPED_TEST(Half, LongContexts) {
  for (const index_t kv_len : {1023, 1025, 2049})
    for (const index_t q_len : {1, 40}) {
      spec s;
      s.q_len = q_len, s.kv_len = kv_len, s.d = 20, s.width = 33, s.heads = 2, s.causal = true;
      verify<TypeParam>(s);
    }
}

// Results beyond the range of T, and NaN in a live key.
TYPED_TEST(Half, OverflowAndNan) {
  for (const schedule_choice schedule : both_schedules) {
    using T = TypeParam;
    const std::vector<T> q(2, element<T>(1)), k = {element<T>(1), element<T>(1), element<T>(std::nan("")), element<T>(0)};
    const double big = std::is_same_v<T, diffattn::f16> ? 65504 : 0x1.fep127;
    const std::vector<T> v = {element<T>(big), element<T>(-big), element<T>(1), element<T>(1)};
    std::vector<T> out(2);
    diffattn::forward_args<T> a;
    a.q = diffattn::view(q.data(), 1, 1, 2, 1), a.k = diffattn::view(k.data(), 1, 1, 2, 1);
    a.v = diffattn::view(v.data(), 1, 1, 1, 2), a.out = diffattn::view(out.data(), 1, 1, 1, 2);
    a.heads = diffattn::head_map::interleaved(1, 1), a.lambda = -1.0f, a.norm = diffattn::head_norm<float>::none();
    a.schedule = schedule;
    ASSERT_EQ(test::run(a), status::ok);
    EXPECT_EQ(test::number(out[0]), std::numeric_limits<double>::infinity()) << name(schedule);
    EXPECT_EQ(test::number(out[1]), -std::numeric_limits<double>::infinity()) << name(schedule);
    a.k.tokens = a.v.tokens = 2;
    ASSERT_EQ(test::run(a), status::ok);
    EXPECT_TRUE(std::isnan(test::number(out[0]))) << name(schedule);
  }
}

TYPED_TEST(Half, StandardAttention) {
  for (const schedule_choice schedule : both_schedules)
    for (const index_t q_len : {1, 5, 40})
      for (const index_t kv_len : {1, 33, 200, 1030}) {
        spec s;
        s.batch = 2, s.q_len = q_len, s.kv_len = kv_len, s.d = 24, s.width = 19, s.heads = 4, s.kv = 2;
        s.heads_family = test::family::shared, s.causal = true;
        problem<float> p(s);
        narrowed<TypeParam> n(p);
        std::vector<float> out(static_cast<std::size_t>(2 * q_len * 8 * 19)), lse(static_cast<std::size_t>(2 * q_len * 8)),
            half_lse = lse;
        diffattn::attention_args<float> f;
        f.q = p.q.view(), f.k = p.k.view(), f.v = p.v.view(), f.out = diffattn::view(out.data(), 2, q_len, 8, 19);
        f.mask = p.args().mask, f.lse = {lse.data(), q_len * 8, 8, 1}, f.schedule = schedule;
        ASSERT_EQ(test::run(f), status::ok);
        n.out.assign(out.size(), element<TypeParam>(-77));
        diffattn::attention_args<TypeParam> a;
        a.q = n.view(n.q, p.q), a.k = n.view(n.k, p.k), a.v = n.view(n.v, p.v);
        a.out = diffattn::view(n.out.data(), 2, q_len, 8, 19), a.mask = f.mask, a.schedule = schedule;
        a.lse = {half_lse.data(), q_len * 8, 8, 1};
        ASSERT_EQ(test::run(a), status::ok);
        n.expect_rounded(out);
        EXPECT_TRUE(test::identical(half_lse, lse));
      }
}

// Eigen's 16-bit types are the same bits.
TYPED_TEST(Half, EigenTensors) {
  using diffattn::view;
  using scalar = test::eigen_type<TypeParam>;
  Eigen::Tensor<scalar, 4, Eigen::RowMajor> q(1, 3, 2, 8), k(1, 9, 2, 8), v(1, 9, 1, 16), out(1, 3, 1, 16);
  for (auto* t : {&q, &k, &v})
    for (Eigen::Index i = 0; i < t->size(); ++i) t->data()[i] = scalar(float(i % 13 - 6) / 4);
  diffattn::forward_args<TypeParam> a;
  a.q = view(q), a.k = view(k), a.v = view(v), a.out = view(out);
  a.heads = diffattn::head_map::interleaved(1, 1), a.lambda = 0.5f, a.norm = diffattn::head_norm<float>::none();
  ASSERT_EQ(test::run(a), status::ok);
  Eigen::Tensor<float, 4, Eigen::RowMajor> fq = q.template cast<float>(), fk = k.template cast<float>(),
                                           fv = v.template cast<float>(), fout(1, 3, 1, 16);
  diffattn::forward_args<float> f;
  f.q = view(fq), f.k = view(fk), f.v = view(fv), f.out = view(fout);
  f.heads = a.heads, f.lambda = 0.5f, f.norm = a.norm;
  ASSERT_EQ(test::run(f), status::ok);
  for (Eigen::Index i = 0; i < out.size(); ++i) EXPECT_EQ(out.data()[i], scalar(fout.data()[i]));
}

}  // namespace
