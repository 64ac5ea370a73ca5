// SPDX-License-Identifier: MIT
// Views: parts of tensors, and caches whose sequences are all of one length.

#include <gtest/gtest.h>

#include <vector>

#include "support/problem.hpp"

namespace {

using diffattn::index_t;
using diffattn::status;
using test::problem;
using test::spec;

TEST(TensorView, TokenRange) {
  std::vector<float> data(2 * 7 * 3 * 4);
  for (const diffattn::layout order : {diffattn::layout::bthd, diffattn::layout::bhtd}) {
    const diffattn::tensor_view<float> whole = diffattn::view(data.data(), 2, 7, 3, 4, order);
    for (index_t first = 0; first <= 7; ++first)
      for (index_t count = 0; first + count <= 7; ++count) {
        const diffattn::tensor_view<float> part = whole.token_range(first, count);
        EXPECT_EQ(part.tokens, count);
        EXPECT_EQ(part.batch, 2);
        EXPECT_EQ(part.heads, 3);
        EXPECT_EQ(part.width, 4);
        EXPECT_EQ(part.width_stride, 1);
        for (index_t b = 0; b < 2; ++b)
          for (index_t t = 0; t < count; ++t)
            for (index_t h = 0; h < 3; ++h) EXPECT_EQ(part.at(b, t, h), whole.at(b, first + t, h));
      }
    EXPECT_EQ(whole.token_range(2, 5).token_range(1, 3).at(1, 2, 2), whole.at(1, 5, 2));
  }
  // Nothing of nothing: no offset from null.
  EXPECT_EQ(diffattn::tensor_view<float>().token_range(3, 0).data, nullptr);
}

TEST(KvView, SameLength) {
  diffattn::kv_view view;
  view.sequences = 3, view.page_tokens = 16;
  EXPECT_EQ(view.length(2), 16);
  view.same_length = 0;
  EXPECT_EQ(view.length(0), 0);
  view.same_length = 9;
  EXPECT_EQ(view.length(2), 9);
  const index_t lengths[] = {4, 5, 6};
  view.lengths = lengths;  // these count
  EXPECT_EQ(view.length(2), 6);
}

// A call on such a cache is the call on tensors of that many tokens.
TEST(KvView, CallsTakeTheSameLength) {
  for (const index_t length : {0, 1, 33, 50}) {
    spec s;
    s.batch = 2, s.q_len = 3, s.kv_len = 50, s.d = 8, s.width = 6, s.gap = 0, s.causal = true;
    problem<float> p(s);
    const diffattn::forward_args<float> whole = p.args();
    diffattn::forward_args<float> a = whole;
    a.k = a.k.token_range(0, length), a.v = a.v.token_range(0, length);
    for (const diffattn::schedule_choice schedule : test::both_schedules) {
      a.schedule = schedule;
      ASSERT_EQ(test::run(a), status::ok);
      const problem<float>::results expected = p.outputs();
      diffattn::forward_args<float> cached = a;
      cached.k = cached.v = {}, cached.cache = diffattn::view_of_tensors(whole.k, whole.v), cached.cache.same_length = length;
      ASSERT_EQ(test::run(cached), status::ok);
      p.expect_identical(p.outputs(), expected);
      cached.cache.same_length = 51;
      EXPECT_EQ(test::run(cached), status::cache_range);
    }
  }
}

/// A call of either kind on a cache of `length` tokens in each of its sequences, without any data in its pages.
template <class Args>
Args cached_call(const std::vector<float>& data, std::vector<float>& out, index_t length) {
  Args a;
  a.q = diffattn::view<const float>(data.data(), 2, 3, 4, 8);
  constexpr bool differential = std::is_same_v<Args, diffattn::forward_args<float>>;
  a.out = diffattn::view(out.data(), 2, 3, differential ? 2 : 4, 8);
  if constexpr (differential) a.heads = diffattn::head_map::interleaved(2, 1), a.lambda = 0.5f;
  const index_t values = differential ? 1 : 2;
  a.cache.keys = {data.data(), diffattn::storage::f32, 2, 8, 0, 0, 0};
  a.cache.values = {data.data(), diffattn::storage::f32, values, 8, 0, 0, 0};
  a.cache.sequences = a.cache.pages = 2, a.cache.page_tokens = 1 << 20, a.cache.same_length = length;
  return a;
}

template <class Args>
struct LongestCall : testing::Test {};
using calls = testing::Types<diffattn::forward_args<float>, diffattn::attention_args<float>>;
TYPED_TEST_SUITE(LongestCall, calls);

TYPED_TEST(LongestCall, WorkspaceLastsUpToItsLength) {
  const std::vector<float> data(1000);
  std::vector<float> out(1000);
  for (const diffattn::schedule_choice schedule : test::both_schedules)
    for (const index_t workers : {1, 3}) {
      const auto at = [&](index_t length) {
        TypeParam a = cached_call<TypeParam>(data, out, length);
        a.schedule = schedule;
        return a;
      };
      for (const index_t longest : {0, 1, 100, 5000, 1 << 20}) {
        const std::size_t bytes = test::workspace_bytes(at(7), workers, longest);
        EXPECT_EQ(bytes, test::workspace_bytes(at(longest), workers)) << test::name(schedule) << ", " << longest;
        for (index_t length = 0; length <= longest; length = 2 * length + 1)
          EXPECT_LE(test::workspace_bytes(at(length), workers), bytes) << test::name(schedule) << ", " << length;
      }
    }
}

// Padding, a window or an offset may let the keys begin and end anywhere.
TYPED_TEST(LongestCall, WorkspaceLastsWhateverTheMask) {
  const std::vector<float> data(1000);
  std::vector<float> out(1000);
  test::random_source random(7);
  for (int repeat = 0; repeat < 4000; ++repeat) {
    const index_t longest = random.integer(0, 5000), length = random.integer(0, longest), workers = random.integer(1, 5);
    TypeParam a = cached_call<TypeParam>(data, out, length);
    a.schedule = test::both_schedules[repeat % 2];
    diffattn::key_range ranges[2];
    for (diffattn::key_range& r : ranges) r.begin = random.integer(0, length), r.end = random.integer(r.begin, length);
    if (random.integer(0, 1)) a.mask.key_ranges = ranges;
    a.mask.causal = random.integer(0, 1) != 0;
    if (a.mask.causal && random.integer(0, 1)) a.mask.window = random.integer(1, longest + 1);
    if (a.mask.causal && random.integer(0, 1)) a.mask.offset = random.integer(-5, longest + 5);
    ASSERT_EQ(test::check(a), status::ok);
    EXPECT_LE(test::workspace_bytes(a, workers), test::workspace_bytes(a, workers, longest))
        << "length " << length << " of " << longest << ", window " << a.mask.window << ", offset " << a.mask.offset << ", "
        << ranges[0].begin << " … " << ranges[0].end << ", " << test::name(a.schedule);
  }
}

TYPED_TEST(LongestCall, NoWorkspaceForWrongArguments) {
  const std::vector<float> data(1000);
  std::vector<float> out(1000);
  const TypeParam good = cached_call<TypeParam>(data, out, 7);
  ASSERT_EQ(test::check(good), status::ok);
  EXPECT_GT(test::workspace_bytes(good, 1, 100), 0u);
  EXPECT_EQ(test::workspace_bytes(good, 1, -1), 0u);
  EXPECT_EQ(test::workspace_bytes(good, 1, index_t{1} << 60), 0u);
  EXPECT_EQ(test::workspace_bytes(good, 1, std::numeric_limits<index_t>::max()), 0u);
  EXPECT_EQ(test::workspace_bytes(good, 1, std::numeric_limits<index_t>::min()), 0u);
  for (const index_t workers : {index_t{0}, index_t{-1}, std::numeric_limits<index_t>::max()})
    EXPECT_EQ(test::workspace_bytes(good, workers, 100), 0u);
  const auto expect_none = [&](auto&& spoil) {
    TypeParam a = good;
    spoil(a);
    EXPECT_NE(test::check(a), status::ok);
    EXPECT_EQ(test::workspace_bytes(a, 1, 100), 0u);
  };
  expect_none([](TypeParam& a) { a.out.data = nullptr; });
  expect_none([](TypeParam& a) { a.q.width = 7; });
  expect_none([](TypeParam& a) { a.cache.page_tokens = 0; });
  expect_none([](TypeParam& a) { a.cache.same_length = (1 << 20) + 1; });
  expect_none([](TypeParam& a) { a.cache.keys.type = diffattn::storage::f64; });
  // Only for caches: the keys of a tensor are as many as they are.
  TypeParam on_tensors = good;
  on_tensors.cache = {};
  on_tensors.k = diffattn::view<const float>(data.data(), 2, 5, 2, 8);
  on_tensors.v = diffattn::view<const float>(data.data(), 2, 5, good.cache.values.heads, 8);
  ASSERT_EQ(test::check(on_tensors), status::ok);
  EXPECT_GT(test::workspace_bytes(on_tensors, 1), 0u);
  EXPECT_EQ(test::workspace_bytes(on_tensors, 1, 100), 0u);
}

}  // namespace
