// SPDX-License-Identifier: MIT
// Keys in parts, each by `forward`, merged: against the reference over all keys, and against one call over all keys.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <diffattn/merge.hpp>
#include <new>
#include <set>
#include <thread>

#include "support/elements.hpp"
#include "support/problem.hpp"

namespace {
bool armed = false;
int allocations = 0;
}  // namespace

#if !defined(DIFFATTN_GUARD)  // which has its own
// Counted while armed, by one thread. Not inline: half of a pair looks like a mistake to compilers.
DIFFATTN_NOINLINE void* operator new(std::size_t size) {
  if (armed) ++allocations;
  if (void* const p = std::malloc(size > 0 ? size : 1)) return p;
  throw std::bad_alloc();
}
DIFFATTN_NOINLINE void operator delete(void* p) noexcept {
  std::free(p);
}
DIFFATTN_NOINLINE void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
#endif

namespace {

using diffattn::index_t;
using diffattn::lambda_view;
using diffattn::norm_kind;
using diffattn::status;
using reference::numbers;
using test::coefficient;
using test::element;
using test::problem;
using test::spec;
using test::tensor;

/// One map over some keys, with its error bound in units of roundoff.
struct map_numbers {
  numbers av, lse;
};

/// The map over the keys of all parts. Errors, relative to a weight w_p = exp(lse_p - lse): δ_p = that of lse_p, of its
/// distance from the maximum and of exp; through the sum of the weights their weighted mean; a rounding or two for each part.
map_numbers combine(const std::vector<map_numbers>& parts) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::size_t rows = parts[0].lse.value.size(), width = parts[0].av.value.size() / std::max<std::size_t>(rows, 1);
  const double sums = 2 * static_cast<double>(parts.size() + 4);
  map_numbers all;
  for (std::size_t r = 0; r < rows; ++r) {
    double top = -inf, sum = 0, mean = 0;
    for (const map_numbers& p : parts) top = std::max(top, p.lse.value[r]);
    std::vector<double> weight, error;
    for (const map_numbers& p : parts) {
      const bool none = p.lse.value[r] == -inf;
      weight.push_back(none ? 0 : std::exp(p.lse.value[r] - top));
      error.push_back(none ? 0 : p.lse.error[r] + top - p.lse.value[r] + 4);
      sum += weight.back();
    }
    for (std::size_t p = 0; p < parts.size() && sum > 0; ++p) mean += (weight[p] /= sum) * error[p];
    const double lse = sum > 0 ? top + std::log(sum) : -inf;
    all.lse.add(lse, sum > 0 ? mean + sums + 4 * std::fabs(lse) : 0);
    for (std::size_t c = 0; c < width; ++c) {
      double x = 0, e = 0;
      for (std::size_t p = 0; p < parts.size(); ++p) {
        const double v = parts[p].av.value[r * width + c];
        x += weight[p] * v, e += weight[p] * (parts[p].av.error[r * width + c] + std::fabs(v) * (error[p] + mean + sums));
      }
      all.av.add(x, e);
    }
  }
  return all;
}

/// The output of the two maps, by the rule for norms of reference.hpp.
template <class T>
numbers finish(const reference::problem<T>& p, const map_numbers (&map)[2]) {
  const std::size_t width = static_cast<std::size_t>(p.dv);
  const double dv = static_cast<double>(p.dv), u = test::epsilon<T>() / 2, sum = 4 * std::sqrt(dv);
  numbers out;
  for (std::size_t row = 0; row < p.factor[0].size(); ++row) {
    std::vector<double> x(width), e(width);
    double mean = 0, size = 0, mean_e = 0, square = 0, square_e = 0;
    for (std::size_t c = 0; c < width; ++c) {
      const double a = p.factor[0][row] * map[0].av.value[row * width + c],
                   b = p.factor[1][row] * map[1].av.value[row * width + c];
      x[c] = a - b, e[c] = 8 * (std::fabs(a) + std::fabs(b));
      for (int m = 0; m < 2; ++m) e[c] += std::fabs(p.factor[m][row]) * map[m].av.error[row * width + c];
      mean += x[c] / dv, size += std::fabs(x[c]) / dv, mean_e += e[c] / dv;
    }
    for (std::size_t c = 0; c < width; ++c) {
      if (p.kind == reference::norm::group) x[c] -= mean, e[c] += mean_e + sum * size;
      square += x[c] * x[c] / dv, square_e += e[c] * e[c] / dv;
    }
    const bool normed = p.kind != reference::norm::none;
    const double root = normed ? std::sqrt(square + p.eps) : 1, root_e = normed ? std::sqrt(square_e) : 0;
    const double least = normed ? std::max(root - u * root_e, std::sqrt(p.eps)) : 1;
    for (std::size_t c = 0; c < width; ++c) {
      const double weight = p.weight.empty() ? 1 : p.weight[c], bias = p.bias.empty() ? 0 : p.bias[c];
      const double y = x[c] / root * weight, y_e = std::fabs(weight) * (e[c] + std::fabs(x[c]) * root_e / root) / least;
      out.add((y + bias) * p.gain, std::fabs(p.gain) * (y_e + (sum + 8) * std::fabs(y) + 4 * std::fabs(bias)));
    }
  }
  return out;
}

template <class T>
diffattn::token_head_view<T> per_row(const tensor<T>& t) {
  const diffattn::tensor_view<T>& v = t.view();
  return {v.data, v.batch_stride, v.token_stride, v.head_stride};
}

/// Memory of a part, and what it must hold.
template <class T>
struct part_memory {
  tensor<T> out1, out2, lse1, lse2;
  map_numbers expected[2];

  part_memory(const diffattn::tensor_view<T>& like, diffattn::layout order, index_t gap) {
    const auto make = [&](index_t width) {
      return tensor<T>(like.batch, like.tokens, like.heads, width, order, gap, false, tensor<T>::untouched);
    };
    out1 = make(like.width), out2 = make(like.width), lse1 = make(1), lse2 = make(1);
  }
  diffattn::attention_part<T> view() const {
    const auto constant = [](const tensor<T>& t) {
      const diffattn::token_head_view<T> v = per_row(t);
      return diffattn::token_head_view<const T>{v.data, v.batch_stride, v.token_stride, v.head_stride};
    };
    return {out1.view(), out2.view(), constant(lse1), constant(lse2)};
  }
};

/// A problem whose keys are cut at some places, each part done by `forward`.
template <class T>
struct split_problem {
  problem<T> p;
  std::vector<part_memory<T>> memory;
  std::vector<diffattn::attention_part<T>> parts;

  split_problem(const spec& s, const std::vector<index_t>& cuts) : p(s) {
    const diffattn::forward_args<T>& all = p.args();
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      const index_t begin = cuts[i], count = cuts[i + 1] - begin;
      memory.emplace_back(p.out.view(), i % 2 == 0 ? diffattn::layout::bthd : diffattn::layout::bhtd, s.gap);
      part_memory<T>& m = memory.back();
      diffattn::forward_args<T> a = all;
      reference::problem<T> r = p.for_reference();
      a.k = all.k.token_range(begin, count), a.v = all.v.token_range(begin, count);
      r.k.data += begin * r.k.token, r.v.data += begin * r.v.token, r.kv_len = count;
      a.mask.offset = all.mask.query_offset(s.q_len, s.kv_len) - begin, r.offset -= begin;
      std::vector<diffattn::key_range> ranges = p.ranges();
      for (std::size_t b = 0; b < ranges.size(); ++b) {
        const auto clip = [&](index_t key) { return std::clamp(key - begin, index_t{0}, count); };
        ranges[b] = {clip(ranges[b].begin), clip(ranges[b].end)};
        r.first[b] = ranges[b].begin, r.last[b] = ranges[b].end;
      }
      if (!ranges.empty()) a.mask.key_ranges = ranges.data();
      a.out1 = m.out1.view(), a.out2 = m.out2.view(), a.lse1 = per_row(m.lse1), a.lse2 = per_row(m.lse2);
      EXPECT_EQ(test::run(a), status::ok);
      const reference::result done = reference::attention(r);
      for (int map = 0; map < 2; ++map) m.expected[map] = {done.av[map], done.lse[map]};
    }
    for (const part_memory<T>& m : memory) parts.push_back(m.view());
  }

  /// The merge of all parts to the outputs of the problem.
  diffattn::merge_args<T> args() {
    const diffattn::forward_args<T>& f = p.args();
    diffattn::merge_args<T> a;
    a.parts = parts.data(), a.count = static_cast<index_t>(parts.size());
    a.out = f.out, a.lambda = f.lambda, a.alpha = f.alpha, a.norm = f.norm;
    a.lse1 = f.lse1, a.lse2 = f.lse2, a.out1 = f.out1, a.out2 = f.out2;
    return a;
  }
  map_numbers combined(int map, std::size_t begin, std::size_t end) const {
    std::vector<map_numbers> of_parts;
    for (std::size_t i = begin; i < end; ++i) of_parts.push_back(memory[i].expected[map]);
    return combine(of_parts);
  }
};

spec random_spec(test::random_source& random, int sample) {
  spec s;
  s.seed = static_cast<std::uint64_t>(sample);
  s.batch = random.integer(1, 3), s.heads_family = test::all_families[random.integer(0, 10)];
  s.ratio = random.integer(1, 2), s.kv = random.integer(1, 2), s.heads = s.kv * s.ratio * random.integer(1, 2);
  if (s.heads_family == test::family::table) s.kv = s.heads;
  s.q_len = random.pick<index_t>({1, 2, 3, 8, 17, 40}), s.kv_len = random.pick<index_t>({0, 1, 2, 9, 33, 64, 200});
  s.d = random.integer(1, 20), s.width = random.pick<index_t>({1, 2, 7, 16, 31});
  s.out_order = random.coin() ? diffattn::layout::bthd : diffattn::layout::bhtd, s.gap = random.integer(0, 2);
  s.causal = random.coin(), s.ranges = random.integer(0, 3) == 0;
  if (s.causal && random.coin()) s.offset = random.integer(-s.q_len, s.kv_len + 5);
  if (s.causal && random.coin()) s.window = random.pick<index_t>({1, 2, 16, 33});
  const auto any = [&] {
    return random.pick<coefficient>({coefficient::number, coefficient::per_head, coefficient::per_token, coefficient::gate});
  };
  s.lambda = any(), s.alpha = any(), s.lambda_value = random.normal(), s.alpha_value = random.pick<double>({1, 0, -0.7});
  s.norm = random.pick<norm_kind>({norm_kind::none, norm_kind::rms, norm_kind::group});
  s.weight = random.coin(), s.bias = s.norm == norm_kind::group && random.coin(), s.gain = random.pick<double>({1, 0.2, -3});
  s.q_amplitude = random.pick<double>({0.1, 1, 20});
  return s;
}

/// Up to seven parts, some of them empty.
std::vector<index_t> random_cuts(test::random_source& random, index_t kv_len) {
  std::vector<index_t> cuts = {0, kv_len};
  for (std::int64_t more = random.integer(0, 6); more > 0; --more)
    cuts.push_back(random.coin() && cuts.size() > 2 ? cuts.back() : random.integer(0, kv_len));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

template <class T>
struct Merge : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Merge, types);

/// Are the outputs those of the reference over all keys, within the bounds of the maps that were merged, and near `whole`?
template <class T>
void expect_merged(split_problem<T>& split, const map_numbers (&map)[2], const reference::result& r,
                   const typename problem<T>::results& whole) {
  problem<T>& p = split.p;
  const typename problem<T>::results merged = p.outputs();
  const auto near = [&](const std::vector<T>& actual, const numbers& exact, const numbers& bound, const std::vector<T>& unsplit,
                        const test::axes& where, const char* what) {
    EXPECT_TRUE(compare(actual, exact.value, p.tolerance(bound), where)) << what;
    numbers both = bound;
    for (std::size_t i = 0; i < both.error.size(); ++i) both.error[i] += exact.error[i];
    EXPECT_TRUE(compare(actual, std::vector<double>(unsplit.begin(), unsplit.end()), p.tolerance(both), where))
        << what << ", unsplit";
  };
  near(merged.out, r.out, finish(p.for_reference(), map), whole.out, p.shape(), "out");
  for (int m = 0; m < 2; ++m) {
    near(merged.raw[m], r.av[m], map[m].av, whole.raw[m], p.shape(), "out1, out2");
    near(merged.lse[m], r.lse[m], map[m].lse, whole.lse[m], p.row_shape(), "lse");
  }
}

TYPED_TEST(Merge, RandomParts) {
  using T = TypeParam;
  test::random_source random(91);
  for (int sample = 0; sample < 400; ++sample) {
    const spec s = random_spec(random, sample);
    const std::vector<index_t> cuts = random_cuts(random, s.kv_len);
    SCOPED_TRACE(s.text() + ", parts " + std::to_string(cuts.size() - 1));
    split_problem<T> split(s, cuts);
    problem<T>& p = split.p;
    const reference::result r = reference::attention(p.for_reference());
    ASSERT_EQ(test::run(p.args()), status::ok);
    const typename problem<T>::results whole = p.outputs();
    const std::size_t n = split.parts.size();

    const map_numbers all[2] = {split.combined(0, 0, n), split.combined(1, 0, n)};
    diffattn::merge_args<T> a = split.args();
    for (std::size_t i = n; i > 1; --i)  // any order
      std::swap(split.parts[i - 1], split.parts[static_cast<std::size_t>(random.integer(0, static_cast<index_t>(i) - 1))]);
    ASSERT_EQ(test::run(a), status::ok);
    expect_merged(split, all, r, whole);

    // The optional outputs change nothing else.
    const std::vector<T> out = p.out.values();
    a.lse1 = a.lse2 = {}, a.out1 = a.out2 = {};
    ASSERT_EQ(test::run(a), status::ok);
    EXPECT_TRUE(identical(p.out.values(), out, p.shape()));

    // One map.
    for (diffattn::attention_part<T>& part : split.parts) part.out2 = {}, part.lse2 = {};
    diffattn::merge_attention_args<T> one;
    one.parts = a.parts, one.count = a.count, one.out = a.out, one.lse = p.args().lse1;
    ASSERT_EQ(test::run(one), status::ok);
    EXPECT_TRUE(compare(p.out.values(), r.av[0].value, p.tolerance(all[0].av), p.shape())) << "one map";
    EXPECT_TRUE(compare(p.lse1.values(), r.lse[0].value, p.tolerance(all[0].lse), p.row_shape())) << "one map";
    for (tensor<T>* t : {&p.out, &p.out1, &p.out2, &p.lse1, &p.lse2}) EXPECT_TRUE(t->gaps_untouched());
  }
}

TYPED_TEST(Merge, Trees) {
  using T = TypeParam;
  test::random_source random(92);
  for (int sample = 0; sample < 100; ++sample) {
    const spec s = random_spec(random, sample);
    std::vector<index_t> cuts = random_cuts(random, s.kv_len);
    if (cuts.size() < 3) cuts.push_back(s.kv_len);
    SCOPED_TRACE(s.text() + ", parts " + std::to_string(cuts.size() - 1));
    split_problem<T> split(s, cuts);
    problem<T>& p = split.p;
    const reference::result r = reference::attention(p.for_reference());
    ASSERT_EQ(test::run(p.args()), status::ok);
    const typename problem<T>::results whole = p.outputs();

    const std::size_t n = split.parts.size(), middle = static_cast<std::size_t>(random.integer(1, static_cast<index_t>(n) - 1));
    std::vector<part_memory<T>> branch;
    std::vector<diffattn::attention_part<T>> branches;
    std::vector<map_numbers> maps[2];
    for (const bool left : {true, false}) {
      branch.emplace_back(p.out.view(), s.out_order, s.gap);
      diffattn::merge_args<T> a = split.args();
      a.parts += left ? 0 : middle, a.count = static_cast<index_t>(left ? middle : n - middle);
      a.out1 = branch.back().out1.view(), a.out2 = branch.back().out2.view();
      a.lse1 = per_row(branch.back().lse1), a.lse2 = per_row(branch.back().lse2);
      ASSERT_EQ(test::run(a), status::ok);
      for (int m = 0; m < 2; ++m) maps[m].push_back(split.combined(m, left ? 0 : middle, left ? middle : n));
    }
    for (const part_memory<T>& b : branch) branches.push_back(b.view());
    diffattn::merge_args<T> a = split.args();
    a.parts = branches.data(), a.count = 2;
    ASSERT_EQ(test::run(a), status::ok);
    expect_merged(split, {combine(maps[0]), combine(maps[1])}, r, whole);
  }
}

// By `attention`, whose output is the product.
TYPED_TEST(Merge, StandardAttention) {
  using T = TypeParam;
  spec s;
  s.batch = 2, s.q_len = 5, s.kv_len = 90, s.d = 8, s.width = 9, s.heads = 2, s.causal = true, s.gap = 0;
  split_problem<T> split(s, {0, 31, 88, 90});
  problem<T>& p = split.p;
  std::vector<diffattn::attention_part<T>> parts;
  for (std::size_t i = 0; i < 3; ++i) {
    const index_t begin = std::vector<index_t>{0, 31, 88}[i], count = std::vector<index_t>{31, 57, 2}[i];
    part_memory<T>& m = split.memory[i];
    diffattn::attention_args<T> a;
    const auto first_map = [](auto view) {
      view.heads /= 2, view.head_stride *= 2;
      return view;
    };
    a.q = first_map(p.args().q), a.k = first_map(p.args().k).token_range(begin, count);
    a.v = p.args().v.token_range(begin, count), a.out = m.out1.view(), a.lse = per_row(m.lse1);
    a.mask.causal = true, a.mask.offset = s.kv_len - s.q_len - begin;
    ASSERT_EQ(test::run(a), status::ok);
    parts.push_back(m.view());
    parts.back().out2 = {}, parts.back().lse2 = {};
  }
  diffattn::merge_attention_args<T> a;
  a.parts = parts.data(), a.count = 3, a.out = p.out.view(), a.lse = per_row(p.lse1);
  ASSERT_EQ(test::run(a), status::ok);
  const reference::result r = reference::attention(p.for_reference());
  const map_numbers expected = split.combined(0, 0, 3);
  EXPECT_TRUE(compare(p.out.values(), r.av[0].value, p.tolerance(expected.av), p.shape()));
  EXPECT_TRUE(compare(p.lse1.values(), r.lse[0].value, p.tolerance(expected.lse), p.row_shape()));
  const std::vector<T> out = p.out.values();
  p.out.for_each([](T& x) { x = T(-1); });
  diffattn::merge(a);  // with memory of its own
  EXPECT_TRUE(identical(p.out.values(), out, p.shape()));
  a.count = 0;
  EXPECT_THROW(diffattn::merge(a), std::invalid_argument);
}

template <class T>
struct HalfMerge : testing::Test {};
using half_types = testing::Types<diffattn::f16, diffattn::bf16>;
TYPED_TEST_SUITE(HalfMerge, half_types);

// The output of the merge in float, rounded once.
TYPED_TEST(HalfMerge, RoundsOnce) {
  using T = TypeParam;
  test::random_source random(93);
  for (int sample = 0; sample < 100; ++sample) {
    const spec s = random_spec(random, sample);
    SCOPED_TRACE(s.text());
    split_problem<float> split(s, random_cuts(random, s.kv_len));
    problem<float>& p = split.p;
    const diffattn::merge_args<float> f = split.args();
    ASSERT_EQ(test::run(f), status::ok);
    const problem<float>::results expected = p.outputs();
    const auto& o = p.out.view();
    std::vector<T> out(expected.out.size());
    diffattn::merge_args<T> a;
    a.parts = f.parts, a.count = f.count, a.out = diffattn::view(out.data(), o.batch, o.tokens, o.heads, o.width);
    a.lambda = f.lambda, a.alpha = f.alpha, a.norm = f.norm;
    a.lse1 = f.lse1, a.lse2 = f.lse2, a.out1 = f.out1, a.out2 = f.out2;
    ASSERT_EQ(test::run(a), status::ok);
    for (std::size_t i = 0; i < out.size(); ++i)
      ASSERT_EQ(out[i].bits, element<T>(double(expected.out[i])).bits) << "element " << i << ", " << expected.out[i];
    problem<float>::results results = p.outputs();
    results.out = expected.out;
    p.expect_identical(results, expected);

    diffattn::merge_attention_args<T> one;
    one.parts = f.parts, one.count = f.count, one.out = a.out;
    ASSERT_EQ(test::run(one), status::ok);
    for (std::size_t i = 0; i < out.size(); ++i)
      ASSERT_EQ(out[i].bits, element<T>(double(expected.raw[0][i])).bits) << "one map, element " << i;
  }
}

/// Two batch entries, 19 rows, 3 heads; all rows see all three parts.
spec plain(norm_kind norm) {
  spec s;
  s.batch = 2, s.q_len = 19, s.kv_len = 30, s.d = 4, s.width = 5, s.heads = 3, s.norm = norm;
  return s;
}

TYPED_TEST(Merge, APartWithoutKeysIsNotRead) {
  using T = TypeParam;
  const T nan = std::numeric_limits<T>::quiet_NaN(), none = -std::numeric_limits<T>::infinity();
  for (const norm_kind norm : {norm_kind::none, norm_kind::rms, norm_kind::group}) {
    split_problem<T> split(plain(norm), {0, 7, 20, 30});
    problem<T>& p = split.p;
    diffattn::merge_args<T> a = split.args();
    a.count = 2;
    ASSERT_EQ(test::run(a), status::ok);
    const typename problem<T>::results expected = p.outputs();
    part_memory<T>& dead = split.memory[2];
    for (tensor<T>* t : {&dead.lse1, &dead.lse2}) t->for_each([none](T& x) { x = none; });
    for (tensor<T>* t : {&dead.out1, &dead.out2}) t->for_each([nan](T& x) { x = nan; });
    a.count = 3;
    for (const std::size_t place : {2u, 1u, 0u}) {  // the others stay in order
      if (place < 2) std::swap(split.parts[place], split.parts[place + 1]);
      ASSERT_EQ(test::run(a), status::ok);
      p.expect_identical(p.outputs(), expected);
    }
  }
}

TYPED_TEST(Merge, NanReachesItsRowAndHead) {
  using T = TypeParam;
  const T nan = std::numeric_limits<T>::quiet_NaN();
  test::random_source random(94);
  for (const norm_kind norm : {norm_kind::none, norm_kind::rms, norm_kind::group})
    for (int sample = 0; sample < 40; ++sample) {
      split_problem<T> split(plain(norm), {0, 7, 20, 30});
      problem<T>& p = split.p;
      const diffattn::merge_args<T> a = split.args();
      ASSERT_EQ(test::run(a), status::ok);
      const std::vector<T> clean = p.out.values();
      part_memory<T>& m = split.memory[static_cast<std::size_t>(random.integer(0, 2))];
      const index_t b = random.integer(0, 1), t = random.integer(0, 18), h = random.integer(0, 2);
      const bool in_lse = random.coin(), first = random.coin();
      (in_lse ? (first ? m.lse1 : m.lse2) : (first ? m.out1 : m.out2)).at(b, t, h, 0) = nan;
      ASSERT_EQ(test::run(a), status::ok);
      const std::vector<T> out = p.out.values();
      const index_t row = (b * 19 + t) * 3 + h;
      for (index_t i = 0; i < static_cast<index_t>(out.size()); ++i) {
        const std::size_t at = static_cast<std::size_t>(i);
        const bool hit = i / 5 == row && (in_lse || norm != norm_kind::none || i % 5 == 0);
        if (hit)
          EXPECT_TRUE(std::isnan(out[at])) << p.shape()(at);
        else
          EXPECT_EQ(out[at], clean[at]) << p.shape()(at);
      }
      EXPECT_EQ(std::isnan(p.lse1.at(b, t, h, 0)), in_lse && first);
      EXPECT_EQ(std::isnan(p.lse2.at(b, t, h, 0)), in_lse && !first);
    }
}

TYPED_TEST(Merge, NoKeysAtAll) {
  using T = TypeParam;
  const T none = -std::numeric_limits<T>::infinity();
  for (const norm_kind norm : {norm_kind::none, norm_kind::rms, norm_kind::group})
    for (const double eps : {0.0, 1e-5}) {
      spec s = plain(norm);
      s.kv_len = 0, s.eps = eps, s.weight = true, s.alpha = coefficient::per_head, s.lambda = coefficient::gate;
      split_problem<T> split(s, {0, 0, 0, 0});
      problem<T>& p = split.p;
      ASSERT_EQ(test::run(split.args()), status::ok);
      for (const tensor<T>* t : {&p.out, &p.out1, &p.out2})
        for (const T x : t->values()) ASSERT_EQ(x, T(0));
      for (const tensor<T>* t : {&p.lse1, &p.lse2})
        for (const T x : t->values()) ASSERT_EQ(x, none);
    }
}

TYPED_TEST(Merge, EqualMapsCancel) {
  using T = TypeParam;
  for (const double factor : {1.0, 0.7, -1.3, 1e-30, 1e30}) {
    spec s = plain(norm_kind::none);
    s.lambda_value = s.alpha_value = factor, s.q_amplitude = 5;
    split_problem<T> split(s, {0, 7, 20, 30});
    for (diffattn::attention_part<T>& part : split.parts) part.out2 = part.out1, part.lse2 = part.lse1;
    ASSERT_EQ(test::run(split.args()), status::ok);
    for (const T x : split.p.out.values()) ASSERT_EQ(x, T(0)) << factor;
  }
}

class threads : public test::any_executor {
 public:
  explicit threads(index_t n) : workers_(n) {}
  index_t workers() const noexcept override { return workers_; }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    diffattn::task_queue queue(tasks);
    std::vector<std::thread> all;
    for (index_t worker = 0; worker < workers_; ++worker)
      all.emplace_back([&queue, f, context, worker] {
        auto task = [f, context](index_t i, index_t w) { f(context, i, w); };
        queue.work(task, worker);
      });
    for (std::thread& t : all) t.join();
  }

 private:
  index_t workers_;
};

TYPED_TEST(Merge, SameBitsForEveryExecutorAndWorkspace) {
  using T = TypeParam;
  for (const norm_kind norm : {norm_kind::none, norm_kind::rms, norm_kind::group}) {
    split_problem<T> split(plain(norm), {0, 7, 7, 30});
    const diffattn::merge_args<T> a = split.args();
    ASSERT_EQ(test::run(a), status::ok);  // serial, exact size, misaligned, guarded
    const typename problem<T>::results serial = split.p.outputs();
    for (const index_t workers : {1, 2, 8})
      for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{33}}) {
        const std::size_t bytes = test::workspace_bytes(a, workers);
        std::vector<unsigned char> memory(bytes + shift + 8, 0xff);
        threads executor(workers);
        split.p.out.for_each([](T& x) { x = T(-1); });
        ASSERT_EQ(test::run(a, {memory.data() + shift, bytes}, executor), status::ok);
        split.p.expect_identical(split.p.outputs(), serial);
        for (std::size_t i = 0; i < memory.size(); ++i) {
          if (i < shift || i >= shift + bytes) {
            ASSERT_EQ(memory[i], 0xff) << "byte " << i;
          }
        }
      }
  }
}

// Rows do not depend on the rows that share a register with them.
TYPED_TEST(Merge, RowsDoNotDependOnTheirNeighbours) {
  using T = TypeParam;
  split_problem<T> split(plain(norm_kind::rms), {0, 7, 20, 30});
  diffattn::merge_args<T> a = split.args();
  ASSERT_EQ(test::run(a), status::ok);
  const std::vector<T> whole = split.p.out.values();
  split.p.out.for_each([](T& x) { x = T(-1); });
  a.lse1 = a.lse2 = {}, a.out1 = a.out2 = {};
  std::vector<diffattn::attention_part<T>> rows(split.parts);
  for (index_t t = 0; t < 19; ++t) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const diffattn::attention_part<T>& from = split.parts[i];
      rows[i].out1 = from.out1.token_range(t, 1), rows[i].out2 = from.out2.token_range(t, 1);
      rows[i].lse1.data = &from.lse1.at(0, t, 0), rows[i].lse2.data = &from.lse2.at(0, t, 0);
    }
    a.parts = rows.data(), a.out = split.p.out.view().token_range(t, 1);
    ASSERT_EQ(test::run(a), status::ok);
  }
  EXPECT_TRUE(identical(split.p.out.values(), whole, split.p.shape()));
}

TYPED_TEST(Merge, TakesNoMemoryFromTheHeap) {
  using T = TypeParam;
  split_problem<T> split(plain(norm_kind::group), {0, 7, 20, 30});
  const diffattn::merge_args<T> a = split.args();
  diffattn::merge_attention_args<T> one;
  one.parts = a.parts, one.count = a.count, one.out = a.out;
  std::vector<unsigned char> memory(diffattn::workspace_bytes(a));
  const diffattn::workspace scratch{memory.data(), memory.size()};
  allocations = 0, armed = true;
  const status s[] = {diffattn::merge(a, scratch), diffattn::merge(one, scratch), diffattn::merge(a, {})};
  armed = false;
  EXPECT_EQ(s[0], status::ok);
  EXPECT_EQ(s[1], status::ok);
  EXPECT_EQ(s[2], status::workspace_null);
  EXPECT_EQ(allocations, 0);
  armed = true;
  void* (*volatile take)(std::size_t) = [](std::size_t n) { return ::operator new(n); };  // compilers leave out pairs
  void* const taken = take(4);
  armed = false;
  ::operator delete(taken);
#if !defined(DIFFATTN_GUARD)
  EXPECT_GT(allocations, 0) << "nothing is counted";
#endif
}

constexpr float sentinel = -5.5f;
constexpr index_t huge = index_t{1} << 55;

/// A valid merge of three parts: 2 batch entries, 5 rows, 4 heads, 3 channels.
struct call {
  std::vector<float> out = std::vector<float>(120, sentinel), out1 = out, out2 = out, lse1 = std::vector<float>(40, sentinel),
                     lse2 = lse1;
  std::vector<float> products[2] = {std::vector<float>(360, 1.0f), std::vector<float>(360, 2.0f)};
  std::vector<float> sums[2] = {std::vector<float>(120, 0.5f), std::vector<float>(120, 0.25f)};
  std::vector<float> vector = std::vector<float>(64, 1.0f);
  std::vector<unsigned char> scratch = std::vector<unsigned char>(1 << 16);
  diffattn::workspace workspace{scratch.data(), scratch.size()};
  index_t workers = 1;
  diffattn::attention_part<float> parts[3];
  diffattn::merge_args<float> args;

  call() {
    for (std::size_t p = 0; p < 3; ++p) {
      parts[p].out1 = diffattn::view<const float>(products[0].data() + 120 * p, 2, 5, 4, 3);
      parts[p].out2 = diffattn::view<const float>(products[1].data() + 120 * p, 2, 5, 4, 3);
      parts[p].lse1 = {sums[0].data() + 40 * p, 20, 4, 1}, parts[p].lse2 = {sums[1].data() + 40 * p, 20, 4, 1};
    }
    args.parts = parts, args.count = 3, args.lambda = 0.5f;
    args.out = diffattn::view(out.data(), 2, 5, 4, 3);
    args.out1 = diffattn::view(out1.data(), 2, 5, 4, 3), args.out2 = diffattn::view(out2.data(), 2, 5, 4, 3);
    args.lse1 = {lse1.data(), 20, 4, 1}, args.lse2 = {lse2.data(), 20, 4, 1};
  }
  call(const call&) = delete;
  call& operator=(const call&) = delete;

  /// The one-map call on the same numbers.
  diffattn::merge_attention_args<float> one_map() const {
    diffattn::merge_attention_args<float> a;
    a.parts = args.parts, a.count = args.count, a.out = args.out, a.lse = args.lse1;
    return a;
  }

  template <class Args>
  status run(const Args& a) {
    threads executor(workers);
    return test::run(a, workspace, executor);
  }
  void expect_untouched() const {
    for (const std::vector<float>* o : {&out, &out1, &out2, &lse1, &lse2})
      for (const float x : *o) ASSERT_EQ(x, sentinel);
  }
};

struct misuse {
  status expected;
  void (*make)(call&);
};

const misuse misuses[] = {
    {status::ok, [](call&) {}},
    {status::out_null, [](call& c) { c.args.out.data = nullptr; }},
    {status::out_size, [](call& c) { c.args.out.width = 0; }},
    {status::out_size, [](call& c) { c.args.out.tokens = -1; }},
    {status::out_size, [](call& c) { c.args.out.head_stride = -huge; }},
    {status::out_width_stride, [](call& c) { c.args.out.width_stride = 2; }},
    {status::out_strides, [](call& c) { c.args.out.head_stride = 0; }},
    {status::out_strides, [](call& c) { c.args.out.token_stride = 2; }},
    {status::merge_parts, [](call& c) { c.args.parts = nullptr; }},
    {status::merge_parts, [](call& c) { c.args.count = 0; }},
    {status::merge_parts, [](call& c) { c.args.count = -3; }},
    {status::merge_parts, [](call& c) { c.args.count = std::numeric_limits<index_t>::max(); }},
    {status::merge_part_shape, [](call& c) { c.parts[0].out1.data = nullptr; }},
    {status::merge_part_shape, [](call& c) { c.parts[1].out2.data = nullptr; }},
    {status::merge_part_shape, [](call& c) { c.parts[2].out1.batch = 1; }},
    {status::merge_part_shape, [](call& c) { c.parts[2].out2.batch = 3; }},
    {status::merge_part_shape, [](call& c) { c.parts[0].out2.tokens = 4; }},
    {status::merge_part_shape, [](call& c) { c.parts[1].out1.heads = 3; }},
    {status::merge_part_shape, [](call& c) { c.parts[1].out1.width = 2; }},
    {status::merge_part_shape, [](call& c) { c.parts[0].out1.width_stride = 2; }},
    {status::merge_part_shape, [](call& c) { c.parts[0].out2.token_stride = huge; }},
    {status::merge_part_shape, [](call& c) { c.parts[2].out1.batch_stride = std::numeric_limits<index_t>::min(); }},
    {status::merge_part_shape, [](call& c) { c.parts[1].lse1.data = nullptr; }},
    {status::merge_part_shape, [](call& c) { c.parts[2].lse2.data = nullptr; }},
    {status::merge_part_shape, [](call& c) { c.parts[0].lse1.batch_stride = huge; }},
    {status::merge_part_shape, [](call& c) { c.parts[1].lse2.token_stride = -huge; }},
    {status::merge_part_shape, [](call& c) { c.parts[2].lse1.head_stride = std::numeric_limits<index_t>::max(); }},
    // What is written lies in a part.
    {status::merge_part_shape, [](call& c) { c.parts[2].out1.data = c.out.data(); }},
    {status::merge_part_shape, [](call& c) { c.parts[0].out2.data = c.out.data() + 119; }},
    {status::merge_part_shape, [](call& c) { c.parts[1].lse1.data = c.out.data() - 39; }},
    {status::merge_part_shape, [](call& c) { c.parts[1].lse2.data = c.lse1.data(); }},
    {status::merge_part_shape, [](call& c) { c.parts[1].lse1.data = c.lse2.data(); }},
    {status::merge_part_shape, [](call& c) { c.parts[1].out1.data = c.out1.data(); }},
    {status::merge_part_shape, [](call& c) { c.parts[1].out2.data = c.out2.data() - 119; }},
    {status::merge_part_shape, [](call& c) { c.args.lse1.data = reinterpret_cast<float*>(c.parts); }},
    {status::lambda_missing, [](call& c) { c.args.lambda = lambda_view<float>(); }},
    {status::lambda_missing, [](call& c) { c.args.lambda = lambda_view<float>::per_head(nullptr); }},
    {status::lambda_shape, [](call& c) { c.args.lambda = lambda_view<float>::per_token(c.vector.data(), 4, 4); }},
    {status::lambda_shape, [](call& c) { c.args.lambda = lambda_view<float>::gate(c.vector.data(), 5, 3); }},
    {status::lambda_shape,
     [](call& c) {
       c.args.lambda = lambda_view<float>::strided({c.vector.data(), huge, 0, 0});
     }},
    {status::alpha_missing, [](call& c) { c.args.alpha = lambda_view<float>(); }},
    {status::alpha_shape, [](call& c) { c.args.alpha = lambda_view<float>::per_token(c.vector.data(), 5, 5); }},
    {status::norm_eps, [](call& c) { c.args.norm.eps = -1e-9f; }},
    {status::norm_eps, [](call& c) { c.args.norm.eps = std::numeric_limits<float>::quiet_NaN(); }},
    {status::norm_gain, [](call& c) { c.args.norm.gain = std::numeric_limits<float>::infinity(); }},
    {status::norm_bias, [](call& c) { c.args.norm.bias = c.vector.data(); }},
    {status::out_overlaps_parameter, [](call& c) { c.args.lambda = lambda_view<float>::per_head(c.out.data() + 119); }},
    {status::out_overlaps_parameter, [](call& c) { c.args.alpha = lambda_view<float>::per_head(c.out.data() - 3); }},
    {status::out_overlaps_parameter, [](call& c) { c.args.norm.weight = c.out.data(); }},
    {status::out_overlaps_parameter, [](call& c) { c.args.norm.kind = norm_kind::group, c.args.norm.bias = c.out.data() + 8; }},
    {status::lse_strides, [](call& c) { c.args.lse1.head_stride = 0; }},
    {status::lse_strides, [](call& c) { c.args.lse2.batch_stride = huge; }},
    {status::lse_overlap, [](call& c) { c.args.lse1.data = c.out.data(); }},
    {status::lse_overlap, [](call& c) { c.args.lse2.data = c.lse1.data() + 1; }},
    {status::lse_overlap, [](call& c) { c.args.norm.weight = c.lse1.data(); }},
    {status::raw_out_shape, [](call& c) { c.args.out1.tokens = 4; }},
    {status::raw_out_shape, [](call& c) { c.args.out2.width_stride = 2; }},
    {status::raw_out_strides, [](call& c) { c.args.out1.batch_stride = 0; }},
    {status::raw_out_overlap, [](call& c) { c.args.out1.data = c.out.data(); }},
    {status::raw_out_overlap, [](call& c) { c.args.out2.data = c.out1.data(); }},
    {status::executor_workers, [](call& c) { c.workers = 0; }},
    {status::executor_workers, [](call& c) { c.workers = -1; }},
    {status::workspace_overflow, [](call& c) { c.workers = index_t{1} << 47; }},
    {status::workspace_null, [](call& c) { c.workspace.data = nullptr; }},
    {status::workspace_too_small, [](call& c) { c.workspace.bytes = test::workspace_bytes(c.args) - 1; }},
    {status::workspace_too_small, [](call& c) { c.workers = 2, c.workspace.bytes = test::workspace_bytes(c.args); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.out.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.out1.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.out2.data() + 119; }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.lse1.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.lse2.data(); }},
    {status::workspace_overlap, [](call& c) { c.args.norm.weight = reinterpret_cast<float*>(c.scratch.data() + 128); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.products[0].data() + 359; }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.products[1].data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.sums[0].data() + 119; }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.sums[1].data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.parts; }},
};

TEST(MergeCheck, EveryMisuseHasItsStatus) {
  int number = 0;
  for (const misuse& m : misuses) {
    SCOPED_TRACE("misuse " + std::to_string(number++) + ", expected: " + message(m.expected));
    call c;
    m.make(c);
    // A workspace elsewhere is never larger than needed there, so that it touches nothing by accident.
    if (c.workspace.bytes == c.scratch.size() && c.workspace.data != c.scratch.data() && c.workspace.data)
      c.workspace.bytes = test::workspace_bytes(c.args);
    const status s = c.run(c.args);
    EXPECT_EQ(s, m.expected) << "got: " << message(s);
    const bool runs = s == status::ok || (s >= status::executor_workers && s <= status::workspace_overlap);
    EXPECT_EQ(test::check(c.args), runs ? status::ok : s);
    EXPECT_EQ(test::workspace_bytes(c.args) > 0, runs);
    if (s != status::ok) c.expect_untouched();
  }
}

// The second map of a part is not looked at, nor may the first one be wrong.
TEST(MergeCheck, OneMap) {
  const auto expect = [](status expected, void (*make)(call&)) {
    call c;
    make(c);
    const status s = c.run(c.one_map());
    EXPECT_EQ(s, expected) << "got: " << message(s);
    if (s != status::ok) c.expect_untouched();
  };
  expect(status::ok, [](call&) {});
  expect(status::ok, [](call& c) {
    for (auto& part : c.parts) part.out2 = {}, part.lse2 = {};
  });
  expect(status::ok,
         [](call& c) { c.workspace.data = c.products[1].data(), c.workspace.bytes = test::workspace_bytes(c.args); });
  expect(status::ok, [](call& c) { c.args.lse1 = {}; });
  expect(status::out_null, [](call& c) { c.args.out.data = nullptr; });
  expect(status::merge_parts, [](call& c) { c.args.count = 0; });
  expect(status::merge_part_shape, [](call& c) { c.parts[1].lse1.data = nullptr; });
  expect(status::merge_part_shape, [](call& c) { c.parts[2].out1.width = 4; });
  expect(status::merge_part_shape, [](call& c) { c.parts[2].out1.data = c.out.data(); });
  expect(status::lse_strides, [](call& c) { c.args.lse1.token_stride = 0; });
  expect(status::lse_overlap, [](call& c) { c.args.lse1.data = c.out.data() + 1; });
  expect(status::executor_workers, [](call& c) { c.workers = 0; });
  expect(status::workspace_null, [](call& c) { c.workspace.data = nullptr; });
  expect(status::workspace_too_small, [](call& c) { c.workspace.bytes = 10; });
  expect(status::workspace_overlap, [](call& c) { c.workspace.data = c.products[0].data(); });
}

TEST(MergeCheck, WhatIsFine) {
  const auto expect_ok = [](void (*make)(call&)) {
    call c;
    make(c);
    const status s = c.run(c.args);
    EXPECT_EQ(s, status::ok) << message(s);
  };
  expect_ok([](call& c) { c.args.lse1 = c.args.lse2 = {}, c.args.out1 = c.args.out2 = {}; });
  expect_ok([](call& c) { c.args.out1.data = c.args.out2.data = nullptr, c.args.out1.token_stride = -huge * 64; });
  expect_ok([](call& c) { c.parts[1] = c.parts[0]; });
  expect_ok([](call& c) { c.parts[0].lse1 = {c.vector.data(), 0, 0, 0}, c.parts[0].out1.token_stride = 0; });
  // Nothing to do: no data, no workspace.
  expect_ok([](call& c) {
    c.args.out.tokens = c.args.out1.tokens = c.args.out2.tokens = 0, c.args.out.data = nullptr;
    for (auto& part : c.parts) {
      part.out1.tokens = part.out2.tokens = 0, part.out1.data = part.out2.data = nullptr;
      part.lse1.data = part.lse2.data = nullptr;
    }
    c.workspace = {};
  });
}

// Whatever the fields of the views are, as long as there are as many parts as is said.
TEST(MergeCheck, GarbageViews) {
  test::random_source random(95);
  const index_t least = std::numeric_limits<index_t>::min(), most = std::numeric_limits<index_t>::max();
  std::set<status> seen;
  for (int sample = 0; sample < 20'000; ++sample) {
    call c;
    const auto any = [&] {
      return random.pick<index_t>(
          {0, 1, -1, 2, 3, 4, 12, -96, huge, -huge, index_t{1} << 60, least, least + 1, most, most / 2});
    };
    const auto spoil = [&](auto& x) {
      switch (random.integer(0, 8)) {
        case 0: x.data = nullptr; break;
        case 1: x.batch = any(); break;
        case 2: x.tokens = any(); break;
        case 3: x.heads = any(); break;
        case 4: x.width = any(); break;
        case 5: x.batch_stride = any(); break;
        case 6: x.token_stride = any(); break;
        case 7: x.head_stride = any(); break;
        default: x.width_stride = any(); break;
      }
    };
    const auto spoil_rows = [&](auto& x) {
      switch (random.integer(0, 3)) {
        case 0: x.data = nullptr; break;
        case 1: x.batch_stride = any(); break;
        case 2: x.token_stride = any(); break;
        default: x.head_stride = any(); break;
      }
    };
    for (std::int64_t i = random.integer(1, 3); i > 0; --i) {
      diffattn::attention_part<float>& part = c.parts[random.integer(0, 2)];
      switch (random.integer(0, 9)) {
        case 0: spoil(part.out1); break;
        case 1: spoil(part.out2); break;
        case 2: spoil_rows(part.lse1); break;
        case 3: spoil_rows(part.lse2); break;
        case 4: spoil(c.args.out); break;
        case 5: spoil(random.coin() ? c.args.out1 : c.args.out2); break;
        case 6: spoil_rows(random.coin() ? c.args.lse1 : c.args.lse2); break;
        case 7: c.args.count = random.pick<index_t>({least, -1, 0, 1, 3, most}); break;
        case 8: {  // sizes that agree
          const index_t size = any();
          const bool tokens = random.coin();
          const auto set = [&](auto& x) { (tokens ? x.tokens : x.width) = size; };
          set(c.args.out), set(c.args.out1), set(c.args.out2);
          for (auto& p : c.parts) set(p.out1), set(p.out2);
          break;
        }
        default: c.args.lambda = lambda_view<float>::strided({c.vector.data(), any(), any(), any()}); break;
      }
    }
    const status s = test::check(c.args);
    seen.insert(s);
    EXPECT_EQ(s != status::ok && test::workspace_bytes(c.args, 3) > 0, false);
    test::check(c.one_map());
  }
  EXPECT_GE(seen.size(), 8u);
}

}  // namespace
