// SPDX-License-Identifier: MIT
// The list of hand-made edge cases with exact results; a test row carries the number that it has there. Each is run in float
// and double, and in the 16-bit types if they hold its numbers, by both schedules, on tensors and from caches, with d and dv
// padded by zero channels, and with its rows at different places of a block of queries.
//
// In other files: E55 to E57 as index tables too (heads_test), E59 (check_test), E67 and E68 (lambda_test).
// Expressed by other means, since masks here are intervals that both maps share: E26 (rows without keys), E27 and E28 (one map
// without keys) by logits of -inf, which leave a row no weight just as a mask does; E30 only as the boolean mask.
// Not covered: E23 (a padded key between two valid ones: key ranges are intervals), E29 (needs an additive bias), E69 and E70
// (sinks), E71 (soft-cap).

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <diffattn/merge.hpp>
#include <limits>
#include <string>
#include <vector>

#include "support/calls.hpp"
#include "support/compare.hpp"
#include "support/elements.hpp"
#include "support/ways.hpp"

namespace {

using diffattn::attention_mask;
using diffattn::head_map;
using diffattn::index_t;
using diffattn::key_range;
using diffattn::status;

const double ln3 = std::log(3.0);
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

using row = std::vector<double>;

/// One row of the list. Widths are 1 unless `v` has more channels; queries are 1 unless given.
struct edge_case {
  const char* id;
  row k1, k2;
  std::vector<row> v;         ///< [channel][key]
  row lambda;                 ///< one, or one for each query
  std::vector<row> expected;  ///< [query][channel]
  bool causal = false;
  index_t offset = attention_mask::align_to_end;
  index_t window = attention_mask::unlimited;
  key_range keys = {0, -1};  ///< end -1: all
  row q1 = {}, q2 = {};
  double scale = 1;
  index_t repeat = 1;  ///< channels of q and k that hold the same number
  diffattn::norm_kind norm = diffattn::norm_kind::none;
  row weight = {};
  double gain = 1, eps = 1e-5;
  bool exact = false;
  double amplification = 1;  ///< of rounding errors, by a norm after a cancellation
};

row count(int n) {
  row r;
  for (int j = 0; j < n; ++j) r.push_back(j);
  return r;
}
/// n zeros with `x` at place `at`.
row zeros_but(int n, int at, double x) {
  row r(static_cast<std::size_t>(n));
  r[static_cast<std::size_t>(at)] = x;
  return r;
}

std::vector<edge_case> cases() {
  const row one_to_six = {1, 2, 3, 6}, odd = {1, 3, 5, 7}, zero4(4);
  std::vector<edge_case> c = {
      {"E01", {5}, {-3}, {{2}}, {0.25}, {{1.5}}},
      {"E02", {0, ln3}, {9, -9}, {{4, 8}}, {0}, {{7}}},
      {"E04", {0, ln3}, {0, ln3}, {{4, 8}}, {0.5}, {{3.5}}},
      {"E05", {0, 0}, {0, ln3}, {{4, 8}}, {-1}, {{13}}},
      {"E06", {0, 0}, {0, ln3}, {{4, 8}}, {2}, {{-8}}},
      {"E07", {0, ln3}, {0, 0}, {{4, 8}}, {1}, {{1}}},
      {"E08", {7, 7, 7, 7}, {-2, -2, -2, -2}, {one_to_six}, {0.5}, {{1.5}}},
      {"E09", {0, 0}, {0, 0}, {{4, 8}}, {0, 1}, {{6}, {0}}},
      {"E37", {0, 0}, {0, 0}, {{1, nan}, {1, 3}}, {0.5}, {{nan, 1}}},
      {"E38", {-infinity, 0}, {0, 0}, {{2, 9}}, {0}, {{9}}},
      {"E39", {infinity, 0}, {0, 0}, {{2, 9}}, {0}, {{nan}}},
      {"E40", {0, 0}, {nan, 0}, {{4, 8}}, {0}, {{nan}}},
      {"E41", {1e5, 0}, {-1e5, 0}, {{2, 9}}, {0.5}, {{-2.5}}},
      {"E42", {1e5, 1e5}, {-1e5, -1e5}, {{2, 9}}, {2}, {{-5.5}}},
      {"E43", zeros_but(65, 64, 1000), zeros_but(65, 0, 1000), {count(65)}, {1}, {{64}}},
      {"E44", row(31), row(31), {count(31)}, {0.5}, {{7.5}}},
      {"E45", row(32), row(32), {count(32)}, {0.5}, {{7.75}}},
      {"E46", row(33), row(33), {count(33)}, {0.5}, {{8}}},
      {"E47", row(65), row(65), {count(65)}, {0.5}, {{16}}},
      {"E48", row(97), row(97), {count(97)}, {0.5}, {{24}}},
      {"E49", zeros_but(33, 32, 1000), row(33), {count(33)}, {1}, {{16}}},
      {"E50", {}, {}, {{}}, {0.5}, {{0}}},
  };
  const auto add = [&c](edge_case e, auto&& set) {
    set(e);
    c.push_back(std::move(e));
  };
  const auto exact = [](edge_case& e) { e.exact = true; };
  add({"E03", {0, ln3}, {0, ln3}, {{4, 8}}, {1}, {{0}}}, exact);
  for (const diffattn::norm_kind kind : {diffattn::norm_kind::rms, diffattn::norm_kind::group})
    add({"E03 after the norm", {0, ln3}, {0, ln3}, {{4, 8}}, {1}, {{0}}},
        [kind](edge_case& e) { e.exact = true, e.norm = kind; });
  add({"E35", {0, 0}, {0, 0}, {{4, 8}}, {0.5}, {{3}, {nan}}}, [](edge_case& e) { e.q1 = {1, nan}, e.q2 = {1, 1}; });
  add({"E36", {0, 0}, {0, 0}, {{4, 8}}, {0.5}, {{nan}, {3}}}, [](edge_case& e) { e.q1 = {1, 1}, e.q2 = {nan, 1}; });
  add({"E10", {0, ln3 / 2}, {0, 0}, {{4, 8}}, {1}, {{1}}}, [](edge_case& e) { e.repeat = 4, e.scale = 0.5; });
  add({"E10 with the scale by default", {0, ln3 / 2}, {0, 0}, {{4, 8}}, {1}, {{1}}},
      [](edge_case& e) { e.repeat = 4, e.scale = 0; });

  const auto causal = [](edge_case& e) { e.causal = true; };
  add({"E11", row(3), row(3), {{3, 6, 9}}, {0.5}, {{1.5}, {2.25}, {3}}}, causal);
  add({"E12", zero4, zero4, {one_to_six}, {0}, {{2}, {3}}}, causal);
  add({"E13", zero4, zero4, {one_to_six}, {0.5}, {{1.5}}}, causal);
  add({"E14", {0, 0}, {0, 0}, {{4, 8}}, {0.5}, {{0}, {0}, {2}, {3}}}, causal);
  add({"E15", zero4, zero4, {one_to_six}, {0}, {{1}, {1.5}}}, [](edge_case& e) { e.causal = true, e.offset = 0; });
  add({"E16", row(3), row(3), {{3, 6, 9}}, {0.5}, {{3}}}, causal);
  const std::vector<row> windows[] = {
      {{1}, {3}, {5}, {7}}, {{1}, {2}, {4}, {6}}, {{1}, {2}, {3}, {5}}, {{1}, {2}, {3}, {4}}, {{1}, {2}, {3}, {4}}};
  static const char* const window_ids[] = {"E17", "E18", "E19", "E20", "E21"};
  for (int w = 1; w <= 5; ++w)
    add({window_ids[w - 1], zero4, zero4, {odd}, {0}, windows[w - 1]}, [w](edge_case& e) { e.causal = true, e.window = w; });
  add({"E22", row(5), row(5), {{1, 3, 6, 9, 12}}, {0}, {{6}, {9}}}, [](edge_case& e) { e.causal = true, e.window = 3; });
  add({"E24", row(33), row(33), {count(33)}, {0}, {{32}}}, [](edge_case& e) { e.causal = true, e.window = 1; });
  for (const diffattn::norm_kind kind : {diffattn::norm_kind::none, diffattn::norm_kind::rms, diffattn::norm_kind::group})
    add({"E25", {0, 1}, {1, 0}, {{4, 8}}, {0.5}, {{0}}}, [kind](edge_case& e) {
      e.keys = {0, 0}, e.norm = kind, e.exact = true;
    });
  add({"E27", {-infinity, -infinity}, {0, ln3}, {{4, 8}}, {0.5}, {{-3.5}}}, [](edge_case&) {});
  add({"E28", {0, 0}, {-infinity, -infinity}, {{4, 8}}, {0.5}, {{6}}}, [](edge_case&) {});
  add({"E30", {0, ln3, 0}, {0, 0, 0}, {{4, 8, 100}}, {1}, {{1}}}, [](edge_case& e) { e.keys = {0, 2}; });
  add({"E31", {0, 0}, {0, 0}, {{4, 8}}, {0}, {{0}, {8}}}, [](edge_case& e) { e.causal = true, e.keys = {1, 2}; });
  add({"E32", {0, nan}, {0, nan}, {{2, 9}}, {0.5}, {{1}}}, [](edge_case& e) { e.keys = {0, 1}; });
  add({"E33", {0, 0}, {0, 0}, {{2, infinity}}, {0.5}, {{1}}}, [](edge_case& e) { e.keys = {0, 1}; });
  add({"E34", {0, nan}, {0, nan}, {{2, nan}}, {0.5}, {{1}, {nan}}}, causal);

  // The difference itself, from one key with λ = 0; then the norm.
  const auto norm_of = [&add](const char* id, row difference, row expected, row weight, double gain, double eps) {
    std::vector<row> v;
    for (const double x : difference) v.push_back({x});
    add({id, {0}, {0}, v, {0}, {expected}},
        [&](edge_case& e) { e.norm = diffattn::norm_kind::rms, e.weight = weight, e.gain = gain, e.eps = eps; });
  };
  const double e61 = 0.8 / std::sqrt(12.5 + 1e-5);
  norm_of("E61", {3, 4}, {3 * e61, 8 * e61}, {1, 2}, 0.8, 1e-5);
  const double e62 = 1e-3 / std::sqrt(1.1e-5), e62b = 1e-3 / std::sqrt(2e-6);
  norm_of("E62", {1e-3, 1e-3}, {e62, e62}, {1, 1}, 1, 1e-5);
  norm_of("E62 with eps 1e-6", {1e-3, 1e-3}, {e62b, e62b}, {1, 1}, 1, 1e-6);
  const double e63 = 1e-25 / std::sqrt(1e-5);
  norm_of("E63", {1e-25, 1e-25}, {e63, e63}, {1, 1}, 1, 1e-5);
  norm_of("E64", {3e20, 4e20}, {3 / std::sqrt(12.5), 4 / std::sqrt(12.5)}, {1, 1}, 1, 1e-5);
  norm_of("E65", {0, 0}, {0, 0}, {1, 2}, 1, 1e-5);
  add({"E66", {0, ln3}, {0, ln3}, {{4, 8}}, {1 - 1.0 / 1024}, {{7.0 / 1024 / std::sqrt(49.0 / 1024 / 1024 + 1e-5)}}},
      [](edge_case& e) {
        // y = x / √(x² + eps), so dy/dx = eps / (x² + eps)^1.5 = 23 at x = 7/1024.
        e.norm = diffattn::norm_kind::rms, e.amplification = 23;
      });
  return c;
}

/// Can T hold all inputs of a case? (Parameters are numbers of the computing type.)
template <class T>
bool holds(const edge_case& e) {
  bool all = true;
  const auto look = [&all](const row& r) {
    for (const double x : r) all &= std::isnan(x) || test::number(test::element<T>(x)) == x;
  };
  for (const row* r : {&e.k1, &e.k2, &e.q1, &e.q2}) look(*r);
  for (const row& r : e.v) look(r);
  return all;
}

/// Runs `e` with `before` and `after` other query rows around its own and zero channels up to width `pad`.
template <class T>
void verify(const edge_case& e, index_t pad, index_t before, index_t after) {
  using real = diffattn::compute_type<T>;
  SCOPED_TRACE(std::string(e.id) + ", padded to " + std::to_string(pad) + ", " + std::to_string(before) + " rows before, " +
               std::to_string(after) + " after, elements of " + std::to_string(sizeof(T)) + " bytes");
  const auto size = [](const auto& v) { return static_cast<index_t>(v.size()); };
  const index_t rows = size(e.expected), keys = size(e.k1), channels = size(e.v), q_len = before + rows + after;
  const index_t d = e.scale == 0 ? e.repeat : std::max(pad, e.repeat);
  // Zero channels would count in a norm.
  const index_t dv = e.norm == diffattn::norm_kind::none ? std::max(pad, channels) : channels;
  std::vector<T> q(static_cast<std::size_t>(q_len * 2 * d)), k(static_cast<std::size_t>(keys * 2 * d)),
      v(static_cast<std::size_t>(keys * dv)), out(static_cast<std::size_t>(q_len * dv));
  std::vector<real> weight(e.weight.begin(), e.weight.end()), lambda(static_cast<std::size_t>(q_len), real(0.5));
  const auto set = [](std::vector<T>& to, index_t at, double x) { to[static_cast<std::size_t>(at)] = test::element<T>(x); };
  for (index_t i = 0; i < q_len; ++i)
    for (index_t c = 0; c < e.repeat; ++c) {
      const bool own = i >= before && i < before + rows;
      const auto r = static_cast<std::size_t>(i - before);
      set(q, (i * 2) * d + c, !own ? 0.25 : e.q1.empty() ? 1 : e.q1[r]);
      set(q, (i * 2 + 1) * d + c, !own ? -0.5 : e.q2.empty() ? 1 : e.q2[r]);
      if (own) lambda[static_cast<std::size_t>(i)] = static_cast<real>(e.lambda.size() == 1 ? e.lambda[0] : e.lambda[r]);
    }
  for (index_t j = 0; j < keys; ++j) {
    for (index_t c = 0; c < e.repeat; ++c) {
      set(k, (j * 2) * d + c, e.k1[static_cast<std::size_t>(j)]);
      set(k, (j * 2 + 1) * d + c, e.k2[static_cast<std::size_t>(j)]);
    }
    for (index_t c = 0; c < channels; ++c) set(v, j * dv + c, e.v[static_cast<std::size_t>(c)][static_cast<std::size_t>(j)]);
  }
  diffattn::forward_args<T> a;
  a.q = diffattn::view<const T>(q.data(), 1, q_len, 2, d), a.k = diffattn::view<const T>(k.data(), 1, keys, 2, d);
  a.v = diffattn::view<const T>(v.data(), 1, keys, 1, dv), a.out = diffattn::view(out.data(), 1, q_len, 1, dv);
  a.heads = head_map::interleaved(1, 1);
  a.lambda = diffattn::lambda_view<real>::per_token(lambda.data(), q_len, 1);
  a.norm.kind = e.norm, a.norm.eps = static_cast<real>(e.eps), a.norm.gain = static_cast<real>(e.gain);
  if (!weight.empty()) a.norm.weight = weight.data();
  a.scale = static_cast<real>(e.scale);
  a.mask.causal = e.causal, a.mask.window = e.window;
  if (before + after > 0 || e.offset != attention_mask::align_to_end)
    a.mask.offset = (e.offset == attention_mask::align_to_end ? keys - rows : e.offset) - before;
  if (e.keys.end >= 0) a.mask.key_ranges = &e.keys;

  std::vector<double> expected, tolerance;
  for (index_t i = 0; i < rows; ++i) {
    double largest = 0;  // |result| is at most the largest value times the factors of the maps
    for (const row& channel : e.v)
      for (const double x : channel)
        if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
    double lambda_size = 0;
    for (const double l : e.lambda) lambda_size = std::max(lambda_size, std::fabs(l));
    const double size_of_result = e.norm == diffattn::norm_kind::none || e.amplification > 1 ? largest * (1 + lambda_size) : 0;
    for (index_t c = 0; c < channels; ++c) {
      const double x = e.expected[static_cast<std::size_t>(i)][static_cast<std::size_t>(c)];
      expected.push_back(x);
      // Sixteen roundings, of the ln 3 in the inputs, the exponentials, the sums and the norm; then that of the output.
      const double scale_of_error = std::isfinite(x) ? std::max(std::fabs(x), size_of_result * e.amplification) : 1;
      const double rounding = test::is_16_bit<T> && std::isfinite(x) ? std::fabs(x) * test::epsilon<T>() / 2 : 0;
      tolerance.push_back(e.exact ? 0 : 16 * test::epsilon<real>() * scale_of_error + rounding);
    }
  }
  test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
    std::fill(out.begin(), out.end(), test::element<T>(-77));
    ASSERT_EQ(test::run(way), status::ok);
    std::vector<double> actual;
    for (index_t i = 0; i < rows; ++i) {
      const T* const result = out.data() + (before + i) * dv;
      for (index_t c = 0; c < channels; ++c) actual.push_back(test::number(result[c]));
      for (index_t c = channels; c < dv; ++c)
        EXPECT_FALSE(std::isfinite(e.expected[static_cast<std::size_t>(i)][0]) && test::number(result[c]) != 0);
    }
    EXPECT_TRUE(test::compare(actual, expected, tolerance, {{{"row", rows}, {"channel", channels}}}));
  });
}

class EdgeCases : public testing::TestWithParam<edge_case> {};

void PrintTo(const edge_case& e, std::ostream* out) {
  *out << e.id;
}

TEST_P(EdgeCases, Row) {
  for (const index_t pad : {1, 8, 16, 33})
    for (const index_t before : {0, 1, 7, 8, 15, 16, 30, 31, 32})
      for (const index_t after : {0, 1, 20}) {
        verify<float>(GetParam(), pad, before, after);
        verify<double>(GetParam(), pad, before, after);
        if (holds<diffattn::f16>(GetParam())) verify<diffattn::f16>(GetParam(), pad, before, after);
        if (holds<diffattn::bf16>(GetParam())) verify<diffattn::bf16>(GetParam(), pad, before, after);
        if (HasFailure()) return;
      }
}

INSTANTIATE_TEST_SUITE_P(List, EdgeCases, testing::ValuesIn(cases()), [](const testing::TestParamInfo<edge_case>& e) {
  std::string name = e.param.id;
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return name + "_" + std::to_string(e.index);
});

template <class T>
struct Edge : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Edge, types);

// Rows 0, 2 and 3 have only logits of -inf, by a product that overflows.
TYPED_TEST(Edge, E26_RowsWithoutWeightAtStartMiddleAndEnd) {
  using T = TypeParam;
  const T big = std::sqrt(std::numeric_limits<T>::max());
  const T q[] = {big, big, 0, 0, big, big, big, big}, k[] = {-4 * big, -4 * big, -4 * big, -4 * big}, v[] = {4, 8};
  T out[4];
  diffattn::forward_args<T> a;
  a.q = diffattn::view(q, 1, 4, 2, 1), a.k = diffattn::view(k, 1, 2, 2, 1), a.v = diffattn::view(v, 1, 2, 1, 1);
  a.out = diffattn::view(out, 1, 4, 1, 1);
  a.heads = head_map::interleaved(1, 1), a.lambda = T(0.5), a.norm.kind = diffattn::norm_kind::none, a.scale = 1;
  test::for_each_way(a, [&out](const diffattn::forward_args<T>& way) {
    ASSERT_EQ(test::run(way), status::ok);
    EXPECT_EQ(std::vector<T>(out, out + 4), (std::vector<T>{0, 3, 0, 0}));
  });
}

TYPED_TEST(Edge, E25_E51_LogSumExp) {
  using T = TypeParam;
  const T q[] = {1, 1};
  std::vector<T> k(66), v(33), lse(4);
  k[2] = static_cast<T>(ln3);
  T out[1];
  for (const index_t keys : {2, 33, 0}) {
    if (keys == 33) k[2] = 0;
    const key_range range{0, keys};
    diffattn::forward_args<T> a;
    a.q = diffattn::view(q, 1, 1, 2, 1), a.k = diffattn::view<const T>(k.data(), 1, 33, 2, 1);
    a.v = diffattn::view<const T>(v.data(), 1, 33, 1, 1), a.out = diffattn::view(out, 1, 1, 1, 1);
    a.heads = head_map::interleaved(1, 1), a.lambda = T(0.5), a.scale = 1, a.mask.key_ranges = &range;
    a.lse1 = {lse.data(), 1, 1, 1}, a.lse2 = {lse.data() + 1, 1, 1, 1};
    const double expected[] = {keys == 0   ? -infinity
                               : keys == 2 ? std::log(4.0)
                                           : std::log(33.0),
                               keys == 0 ? -infinity : std::log(double(keys))};
    const double eps = 8 * double(std::numeric_limits<T>::epsilon());
    test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
      ASSERT_EQ(test::run(way), status::ok);
      EXPECT_TRUE(test::compare(std::vector<T>(lse.begin(), lse.begin() + 2), {expected[0], expected[1]}, {eps, eps}));
    });
  }
}

TYPED_TEST(Edge, E52_PartsOfTheKeysMerge) {
  using T = TypeParam;
  const T q[] = {1, 1}, k[] = {0, 0, 1000, 0}, v[] = {2, 9};
  for (const bool swapped : {false, true})
    for (const bool empty_part : {false, true}) {
      std::vector<key_range> ranges = {{0, 1}, {1, 2}};
      if (swapped) std::swap(ranges[0], ranges[1]);
      if (empty_part) ranges.insert(ranges.begin(), {1, 1});
      T results[3][4];  // out1, out2, lse1, lse2
      std::vector<diffattn::attention_part<T>> parts;
      for (const key_range& range : ranges) {
        T out[1];
        T* const to = results[parts.size()];
        diffattn::forward_args<T> a;
        a.q = diffattn::view(q, 1, 1, 2, 1), a.k = diffattn::view(k, 1, 2, 2, 1), a.v = diffattn::view(v, 1, 2, 1, 1);
        a.out = diffattn::view(out, 1, 1, 1, 1), a.heads = head_map::interleaved(1, 1), a.lambda = T(0);
        a.scale = 1, a.mask.key_ranges = &range, a.lse1 = {to + 2, 1, 1, 1}, a.lse2 = {to + 3, 1, 1, 1};
        a.out1 = diffattn::view(to, 1, 1, 1, 1), a.out2 = diffattn::view(to + 1, 1, 1, 1, 1);
        ASSERT_EQ(test::run(a), status::ok);
        parts.push_back({a.out1, a.out2, {to + 2, 1, 1, 1}, {to + 3, 1, 1, 1}});
      }
      T out[1], lse[2];
      diffattn::merge_args<T> m;
      m.parts = parts.data(), m.count = static_cast<index_t>(parts.size()), m.out = diffattn::view(out, 1, 1, 1, 1);
      m.norm.kind = diffattn::norm_kind::none, m.lse1 = {lse, 1, 1, 1}, m.lse2 = {lse + 1, 1, 1, 1};
      for (const T lambda : {T(0), T(1)}) {
        m.lambda = lambda;
        diffattn::merge(m);
        EXPECT_EQ(out[0], lambda == T(0) ? T(9) : T(3.5));
      }
      EXPECT_EQ(lse[0], T(1000));
      EXPECT_NEAR(double(lse[1]), std::log(2.0), 4 * test::epsilon<T>());
    }
}

// K has two channels; the queries of map 1 look at the first and those of map 2 at the second, so that both maps can share the
// one key head that all heads share by stride 0.
TYPED_TEST(Edge, E53_E54_StrideZeroHeads) {
  using T = TypeParam;
  struct numbers {
    row k1, k2, v;
    double lambda, expected[2];
  };
  for (const numbers& n :
       {numbers{{0, ln3}, {0, 0}, {4, 8}, 0.5, {4, 3}}, numbers{zeros_but(33, 32, 1000), row(33), count(33), 1, {16, 0}}}) {
    const T q[] = {1, 0, 0, 1, 0, 0, 0, 0};
    std::vector<T> k, v, k_copies, v_copies;
    for (std::size_t j = 0; j < n.v.size(); ++j) {
      k.insert(k.end(), {static_cast<T>(n.k1[j]), static_cast<T>(n.k2[j])});
      v.push_back(static_cast<T>(n.v[j]));
      for (int copy = 0; copy < 2; ++copy) {
        k_copies.insert(k_copies.end(), {static_cast<T>(n.k1[j]), static_cast<T>(n.k2[j])});
        v_copies.push_back(v[j]);
      }
    }
    const index_t keys = static_cast<index_t>(v.size());
    const double eps = 16 * double(std::numeric_limits<T>::epsilon()) * n.v.back();
    std::vector<std::vector<T>> results[2];
    for (const bool copies : {false, true}) {
      std::vector<T> out(2);
      diffattn::forward_args<T> a;
      a.q = diffattn::view(q, 1, 1, 4, 2), a.out = diffattn::view(out.data(), 1, 1, 2, 1);
      if (copies)
        a.k = diffattn::view<const T>(k_copies.data(), 1, keys, 2, 2),
        a.v = diffattn::view<const T>(v_copies.data(), 1, keys, 2, 1);
      else
        a.k = {k.data(), 1, keys, 2, 2, 0, 2, 0, 1}, a.v = {v.data(), 1, keys, 2, 1, 0, 1, 0, 1};
      a.heads = head_map::shared(2, 2), a.lambda = static_cast<T>(n.lambda), a.norm.kind = diffattn::norm_kind::none,
      a.scale = 1;
      test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
        ASSERT_EQ(test::run(way), status::ok);
        EXPECT_TRUE(test::compare(out, {n.expected[0], n.expected[1]}, {eps, eps}));
        results[copies ? 1 : 0].push_back(out);
      });
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

/// One token: a head's output is (1 - λ) times its value.
template <class T>
void expect_of_one_token(const std::vector<double>& expected, const head_map& map, index_t q_heads, index_t k_heads,
                         const std::vector<T>& v, index_t dv, const diffattn::lambda_view<T>& lambda) {
  const std::vector<T> q(static_cast<std::size_t>(q_heads), T(1)), k(static_cast<std::size_t>(k_heads), T(2));
  std::vector<T> out(static_cast<std::size_t>(map.heads * dv));
  diffattn::forward_args<T> a;
  a.q = diffattn::view(q.data(), 1, 1, q_heads, 1), a.k = diffattn::view(k.data(), 1, 1, k_heads, 1);
  a.v = diffattn::view(v.data(), 1, 1, static_cast<index_t>(v.size()), 1),
  a.out = diffattn::view(out.data(), 1, 1, map.heads, dv);
  a.heads = map, a.lambda = lambda, a.norm.kind = diffattn::norm_kind::none, a.mask.causal = true;
  const std::vector<double> tolerance(expected.size(), 40 * 16 * test::epsilon<T>());
  test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
    ASSERT_EQ(test::run(way), status::ok);
    EXPECT_TRUE(test::compare(out, expected, tolerance));
  });
}

TYPED_TEST(Edge, E55_E56_E57_E58_HeadsOfOneToken) {
  using T = TypeParam;
  using values = std::vector<T>;
  const values v = {10, 20, 30, 40};
  const diffattn::lambda_view<T> half = T(0.5);
  expect_of_one_token<T>({5, 10, 5, 10, 15, 20, 15, 20}, head_map::interleaved(4, 2, diffattn::value_layout::adjacent), 8, 4, v,
                         2, half);
  expect_of_one_token<T>({5, 15, 10, 20}, head_map::halves(2, 4), 4, 4, v, 2, half);
  expect_of_one_token<T>({5, 15, 5, 15, 10, 20, 10, 20}, head_map::halves(4, 4), 8, 4, v, 2, half);
  const T logits[] = {0, static_cast<T>(ln3)};
  expect_of_one_token<T>({5, 5}, head_map::shared(2, 2), 4, 2, {10, 20}, 1, diffattn::lambda_view<T>::gate(logits, 1, 2));
}

TYPED_TEST(Edge, E60_OneNoiseHeadForFourSignalHeads) {
  using T = TypeParam;
  const std::vector<T> q = {1, 1, 1, 1, 1, 1, 1, 1, 1, 0};
  const T l = static_cast<T>(ln3), k[] = {0, 0, 0, 0, 0, l, 0, l}, v[] = {4, 4, 8, 8};  // [2 keys][heads]
  std::vector<T> out(8);
  diffattn::forward_args<T> a;
  a.q = diffattn::view<const T>(q.data(), 1, 1, 10, 1), a.k = diffattn::view(k, 1, 2, 4, 1),
  a.v = diffattn::view(v, 1, 2, 2, 1);
  a.out = diffattn::view(out.data(), 1, 1, 8, 1);
  a.heads = head_map::grouped(8, 4, 2, diffattn::value_layout::wide), a.lambda = T(1), a.scale = 1;
  a.norm.kind = diffattn::norm_kind::none;
  test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
    ASSERT_EQ(test::run(way), status::ok);
    EXPECT_TRUE(test::compare(out, {-1, -1, -1, -1, 0, 0, 0, 0}, std::vector<double>(8, 16 * 8 * test::epsilon<T>())));
  });
}

}  // namespace
