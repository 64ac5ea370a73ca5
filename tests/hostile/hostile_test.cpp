// SPDX-License-Identifier: MIT
// The library compiled with unusual flags (calls.cpp) and run in unusual floating-point environments: subnormal numbers
// flushed to zero, directed rounding. Results within the reference's bound, and the exact promises.

#include <gtest/gtest.h>

#include <cfenv>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "../support/elements.hpp"
#include "../support/problem.hpp"
#include "calls.hpp"

namespace {

using diffattn::bf16;
using diffattn::index_t;
using diffattn::status;
using test::both_schedules;
using test::problem;
using test::spec;

enum class environment { plain, flush, upward, downward, toward_zero };

constexpr environment environments[] = {
    environment::plain,
#if defined(__SSE2__)
    environment::flush,
#endif
    environment::upward, environment::downward, environment::toward_zero,
};

const char* name(environment e) {
  static const char* const names[] = {"plain", "flush", "upward", "downward", "toward_zero"};
  return names[static_cast<int>(e)];
}

/// The environment of the calls in a scope. They lie in another object, so nothing is moved past it.
class enter {
 public:
  explicit enter(environment e) {
    static const int modes[] = {FE_TONEAREST, FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    std::fegetenv(&before_);
    std::fesetround(modes[static_cast<int>(e)]);
#if defined(__SSE2__)
    if (e == environment::flush) _mm_setcsr(_mm_getcsr() | 0x8040u);  // FTZ, DAZ
#endif
  }
  ~enter() {
    std::fesetenv(&before_);
  }
  enter(const enter&) = delete;
  enter& operator=(const enter&) = delete;

 private:
  std::fenv_t before_;
};

struct Hostile : testing::TestWithParam<environment> {
  bool is_directed() const { return GetParam() > environment::flush; }

  template <class Args>
  void run(const Args& args) const {
    const enter scope(GetParam());
    const status s = test::run(args);
    ASSERT_EQ(s, status::ok) << message(s);
  }

  /// Directed roundings err by twice as much, all to one side: k of them by 2 k u and not by 4 √k u, √k / 2 times as much. And
  /// exp2 uses its polynomial on [-1, 1] and not [-1/2, 1/2], where it errs by up to 128 ulp (float) and 1.1e5 ulp (double),
  /// not one: 256 u and 2.2e5 u where the reference counts 8.
  template <class T>
  double growth(const problem<T>& p, const spec& s) const {
    if (!is_directed()) return 1;
    const double most = double(std::max({s.d + 4, s.kv_len, p.out.view().width}));
    return std::max(sizeof(T) == 4 ? 256.0 / 8 : 2.2e5 / 8, std::sqrt(most) / 2);
  }
  template <class T>
  std::vector<double> tolerance(const problem<T>& p, const spec& s, const reference::numbers& n) const {
    std::vector<double> t = p.tolerance(n);
    for (double& x : t) x *= growth(p, s);
    return t;
  }
  template <class T>
  void expect_near(const problem<T>& p, const spec& s, const reference::result& r) const {
    EXPECT_TRUE(compare(p.out.values(), r.out.value, tolerance(p, s, r.out), p.shape())) << "out";
    EXPECT_TRUE(compare(p.out1.values(), r.av[0].value, tolerance(p, s, r.av[0]), p.shape())) << "out1";
    EXPECT_TRUE(compare(p.lse2.values(), r.lse[1].value, tolerance(p, s, r.lse[1]), p.row_shape())) << "lse2";
  }
};
INSTANTIATE_TEST_SUITE_P(In, Hostile, testing::ValuesIn(environments),
                         [](const testing::TestParamInfo<environment>& e) { return name(e.param); });

std::vector<spec> shapes() {
  std::vector<spec> all;
  const auto add = [&all](index_t q_len, index_t kv_len, index_t d, index_t width) -> spec& {
    spec s;
    s.q_len = q_len, s.kv_len = kv_len, s.d = d, s.width = width, s.heads = 2, s.kv = 1, s.causal = true;
    s.norm = diffattn::norm_kind::rms, s.seed = static_cast<std::uint64_t>(all.size() + 1);
    all.push_back(s);
    return all.back();
  };
  add(1, 1, 3, 5);
  add(35, 35, 9, 11).batch = 2;
  add(1, 130, 64, 16).weight = true;
  add(4, 70, 33, 7).norm = diffattn::norm_kind::group;
  add(17, 129, 16, 64).causal = false;
  add(40, 100, 8, 8).window = 33;
  add(33, 64, 20, 6).q_amplitude = 20;
  add(9, 40, 5, 5).v_amplitude = 1e-3;
  return all;
}

template <class T>
void verify_float(const Hostile& test, const spec& s) {
  problem<T> p(s);
  const reference::result r = reference::attention(p.for_reference());
  for (const auto schedule : both_schedules) {
    SCOPED_TRACE(s.text() + ", " + test::name(schedule));
    p.args().schedule = schedule;
    test.run(p.args());
    test.expect_near(p, s, r);
  }
}
TEST_P(Hostile, Float) {
  for (const spec& s : shapes()) verify_float<float>(*this, s);
}
TEST_P(Hostile, Double) {
  for (const spec& s : shapes()) verify_float<double>(*this, s);
}

TEST_P(Hostile, Bf16) {
  for (const spec& s : shapes()) {
    SCOPED_TRACE(s.text());
    problem<float> p(s);
    const auto narrow = [](const test::tensor<float>& t, std::vector<bf16>& to) {
      t.for_each([&to](float& x) {
        to.push_back(test::element<bf16>(double(x)));
        x = static_cast<float>(test::number(to.back()));
      });
      const auto& v = t.view();
      return diffattn::view(to.data(), v.batch, v.tokens, v.heads, v.width);
    };
    std::vector<bf16> q, k, v, out;
    const diffattn::forward_args<float>& f = p.args();
    diffattn::forward_args<bf16> a;
    a.q = narrow(p.q, q), a.k = narrow(p.k, k), a.v = narrow(p.v, v), a.out = narrow(p.out, out);
    a.heads = f.heads, a.lambda = f.lambda, a.norm = f.norm, a.mask = f.mask;
    const reference::result r = reference::attention(p.for_reference());
    std::vector<double> t = tolerance(p, s, r.out);
    for (std::size_t i = 0; i < t.size(); ++i)
      t[i] += (is_directed() ? 2 : 1) * test::epsilon<bf16>() / 2 * (std::fabs(r.out.value[i]) + t[i]);
    for (const auto schedule : both_schedules) {
      a.schedule = schedule;
      run(a);
      std::vector<double> actual;
      for (const bf16 x : out) actual.push_back(test::number(x));
      EXPECT_TRUE(compare(actual, r.out.value, t, p.shape())) << test::name(schedule);
    }
  }
}

TEST_P(Hostile, AppendedAndReadFromCaches) {
  for (const diffattn::storage type : test::float_storages)
    for (const test::cache_choice& choice : {test::contiguous, test::cache_choice{test::kv_cache_kind::paged, 16}})
      for (const spec& s : shapes()) {
        SCOPED_TRACE(s.text() + ", " + test::name(type) + ", " + choice.text());
        problem<float> p(s);
        diffattn::kv_cache_config config = p.cache_config(choice);
        config.keys = config.values = type, config.sequences = s.batch, config.capacity = s.kv_len;
        test::owned_cache cache(config);
        {
          const enter scope(GetParam());
          ASSERT_EQ(hostile::append(*cache.operator->(), p.k.view(), p.v.view()), status::ok);
        }
        // What was stored takes the place of the inputs.
        const diffattn::kv_view view = cache->view();
        const auto read_back = [&](const diffattn::kv_rows& rows, const test::tensor<float>& t) {
          for (index_t b = 0; b < s.batch; ++b)
            for (index_t j = 0; j < s.kv_len; ++j)
              for (index_t h = 0; h < rows.heads; ++h) {
                const unsigned char* const row = test::stored_row(view, rows, b, j, h);
                double largest = 0;
                for (index_t c = 0; c < rows.width; ++c) largest = std::max(largest, std::fabs(double(t.at(b, j, h, c))));
                for (index_t c = 0; c < rows.width; ++c) {
                  float& x = t.at(b, j, h, c);
                  const double stored = test::stored_number(type, row, c), size = std::fabs(double(x));
                  const double bound = type == diffattn::storage::f32    ? 0
                                       : type == diffattn::storage::f16  ? size * 0x1p-11 + 0x1p-25
                                       : type == diffattn::storage::bf16 ? size * 0x1p-8
                                       : type == diffattn::storage::int8 ? largest / 253.9
                                                                         : largest / 61.5;
                  EXPECT_LE(std::fabs(stored - double(x)), (is_directed() ? 2 : 1) * bound) << double(x);
                  x = static_cast<float>(stored);
                }
              }
        };
        read_back(view.keys, p.k), read_back(view.values, p.v);
        const reference::result r = reference::attention(p.for_reference());
        diffattn::forward_args<float> a = p.args();
        a.k = a.v = {}, a.cache = view;
        for (const auto schedule : both_schedules) {
          SCOPED_TRACE(test::name(schedule));
          a.schedule = schedule;
          run(a);
          expect_near(p, s, r);
        }
      }
}

template <class T>
void verify_exact(const Hostile& test, spec s) {
  SCOPED_TRACE(s.text());
  for (const auto schedule : both_schedules) {
    SCOPED_TRACE(test::name(schedule));
    // λ = 0 is standard attention, bit for bit.
    spec plain = s;
    plain.lambda_value = 0, plain.norm = diffattn::norm_kind::none, plain.raw = false, plain.heads = plain.kv = 1;
    plain.weight = false;
    problem<T> p(plain);
    p.args().schedule = schedule;
    test.run(p.args());
    const std::vector<T> out = p.out.values(), lse = p.lse1.values();
    diffattn::attention_args<T> a;
    const auto first = [](auto view) {
      view.heads /= 2, view.head_stride *= 2;
      return view;
    };
    const diffattn::forward_args<T>& f = p.args();
    a.q = first(f.q), a.k = first(f.k), a.v = f.v, a.out = f.out, a.mask = f.mask, a.lse = f.lse1, a.schedule = schedule;
    test.run(a);
    EXPECT_TRUE(identical(p.out.values(), out, p.shape())) << "λ = 0";
    EXPECT_TRUE(identical(p.lse1.values(), lse, p.row_shape())) << "λ = 0";

    // Equal maps with λ = 1 cancel.
    s.lambda_value = 1;
    problem<T> equal(s);
    const diffattn::head_indices same[] = {{0, 0, 0, 0, 0, -1}, {1, 1, 0, 0, 0, -1}};
    equal.args().heads = diffattn::head_map::table(same, 2);
    equal.args().schedule = schedule;
    test.run(equal.args());
    for (const T x : equal.out.values()) ASSERT_EQ(x, T(0));
  }
}
TEST_P(Hostile, ExactPromises) {
  for (const spec& s : shapes()) verify_exact<float>(*this, s), verify_exact<double>(*this, s);
}

template <class T>
void verify_contract(const Hostile& test) {
  const T nan = std::numeric_limits<T>::quiet_NaN(), infinity = std::numeric_limits<T>::infinity();
  spec s;
  s.q_len = s.kv_len = 40, s.d = 9, s.width = 7, s.heads = s.kv = 2, s.causal = true, s.norm = diffattn::norm_kind::rms;
  for (const auto schedule : both_schedules) {
    SCOPED_TRACE(test::name(schedule));
    problem<T> p(s);
    p.args().schedule = schedule;
    p.args().mask.offset = -3;                                  // the first rows see nothing
    p.q.at(0, 20, 0, 4) = nan;                                  // row 20 of head 0
    p.k.at(0, 30, 2, 0) = nan;                                  // head 1, rows from 33 on
    p.v.at(0, 32, 0, 3) = infinity;                             // head 0, rows from 35 on
    p.q.at(0, 10, 2, 0) = infinity;                             // row 10 of head 1: infinite scores
    p.k.at(0, 38, 0, 0) = nan, p.v.at(0, 39, 1, 2) = infinity;  // not seen by any row
    test.run(p.args());
    for (index_t row = 0; row < s.q_len; ++row)
      for (index_t h = 0; h < s.heads; ++h) {
        const T x = p.out.at(0, row, h, 3), lse = p.lse1.at(0, row, h, 0);
        const bool live = h == 0 ? row == 20 || row >= 35 : row == 10 || row >= 33;
        EXPECT_EQ(std::isfinite(x), !live) << "row " << row << ", head " << h << ": " << x;
        if (row >= 3) continue;
        EXPECT_EQ(x, T(0));
        EXPECT_EQ(lse, -infinity);
      }
  }
}
TEST_P(Hostile, RowsWithoutKeysAndNotFiniteNumbers) {
  verify_contract<float>(*this);
  verify_contract<double>(*this);
}

}  // namespace
