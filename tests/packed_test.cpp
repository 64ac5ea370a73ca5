// SPDX-License-Identifier: MIT
// Packed sequences and prefixes: against the reference, and against each sequence in a call of its own.

#include <gtest/gtest.h>

#include "support/elements.hpp"
#include "support/problem.hpp"

namespace {

using diffattn::attention_mask;
using diffattn::forward_args;
using diffattn::index_t;
using diffattn::status;
using test::schedule_choice;

/// Tokens of one sequence, and its prefix.
struct sequence {
  index_t queries, keys, prefix = 0;
};
using sequences = std::vector<sequence>;

/// A call on packed sequences. Keys that belong to no sequence lie before the first and behind the last, and are NaN.
template <class T>
class packed_call {
 public:
  packed_call(const test::spec& s, const sequences& all, index_t keys_before = 0, index_t keys_behind = 0)
      : all_(all), spec_(sized(s, all, keys_before + keys_behind)), problem_(spec_) {
    query_starts_ = {0}, key_starts_ = {static_cast<std::int32_t>(keys_before)};
    for (const sequence& one : all) {
      query_starts_.push_back(static_cast<std::int32_t>(query_starts_.back() + one.queries));
      key_starts_.push_back(static_cast<std::int32_t>(key_starts_.back() + one.keys));
      prefixes_.push_back(one.prefix);
    }
    for (index_t j = 0; j < spec_.kv_len; ++j)
      if (j < keys_before || j >= key_starts_.back()) poison_key(j);
    attention_mask& m = problem_.args().mask;
    m.sequences = static_cast<index_t>(all.size()), m.query_starts = query_starts_.data(), m.key_starts = key_starts_.data();
    const bool none = std::all_of(prefixes_.begin(), prefixes_.end(), [](index_t n) { return n == 0; });
    if (spec_.causal && !none) m.prefixes = prefixes_.data();
  }

  test::problem<T>& problem() { return problem_; }
  forward_args<T>& args() { return problem_.args(); }
  index_t first_query(std::size_t s) const { return query_starts_[s]; }
  index_t first_key(std::size_t s) const { return key_starts_[s]; }

  void poison_key(index_t j) {
    const auto poison = [j](const test::tensor<T>& x) {
      for (index_t h = 0; h < x.view().heads; ++h) x.at(0, j, h, 0) = std::numeric_limits<T>::quiet_NaN();
    };
    poison(problem_.k), poison(problem_.v);
  }

  reference::problem<T> for_reference() const {
    reference::problem<T> r = problem_.for_reference();
    r.q_starts.assign(query_starts_.begin(), query_starts_.end()), r.k_starts.assign(key_starts_.begin(), key_starts_.end());
    if (spec_.causal) r.prefix.assign(prefixes_.begin(), prefixes_.end());
    return r;
  }

  /// Sequence s by itself: the same call on its tokens.
  forward_args<T> alone(std::size_t s) {
    forward_args<T> a = args();
    const index_t q = first_query(s), k = first_key(s), queries = all_[s].queries, keys = all_[s].keys;
    const auto cut = [](auto& x, index_t begin, index_t tokens) { x.data += begin * x.token_stride, x.tokens = tokens; };
    cut(a.q, q, queries), cut(a.out, q, queries), cut(a.out1, q, queries), cut(a.out2, q, queries);
    cut(a.k, k, keys), cut(a.v, k, keys);
    a.lse1.data += q * a.lse1.token_stride, a.lse2.data += q * a.lse2.token_stride;
    if (spec_.lambda == test::coefficient::per_token) {
      diffattn::token_head_view<const T> l = a.lambda.array();
      l.data += q * l.token_stride;
      a.lambda = diffattn::lambda_view<T>::strided(l);
    }
    if (auto& bias = a.logits.bias; bias.data) bias.data += q * bias.query_stride + k * bias.key_stride;
    a.mask.sequences = 0, a.mask.query_starts = a.mask.key_starts = nullptr;
    if (a.mask.prefixes) a.mask.prefixes += s;
    return a;
  }

  /// Runs the packed call by both schedules, compares it with `r`, and every sequence with itself alone: bit for bit where its
  /// keys begin at a multiple of what the schedule counts from, else within twice the reference's bound.
  void verify(const reference::result& r) {
    SCOPED_TRACE(spec_.text() + ", " + std::to_string(all_.size()) + " sequences");
    for (const schedule_choice schedule : test::both_schedules) {
      SCOPED_TRACE(test::name(schedule));
      args().schedule = schedule;
      const status s = test::run(args());
      ASSERT_EQ(s, status::ok) << message(s);
      const auto packed = problem_.outputs();
      problem_.expect_near(packed, r);
      for (std::size_t i = 0; i < all_.size(); ++i) ASSERT_EQ(test::run(alone(i)), status::ok) << "sequence " << i;
      const auto each = problem_.outputs();
      problem_.expect_near(each, r);
      const index_t row = spec_.heads * args().out.width;
      for (std::size_t i = 0; i < all_.size(); ++i) {
        // Panels sum by chunks of 128 keys and spans of 2048, the stream by parts of 1024.
        const index_t first = first_key(i), last = std::max(first, first + all_[i].keys - 1);
        const bool one_span = first % 128 == 0 && first / 2048 == last / 2048;
        if (schedule == schedule_choice::panels ? first % 2048 != 0 && !one_span : first % 1024 != 0) continue;
        const auto part = [&](const std::vector<T>& x, index_t width) {
          return std::vector<T>(x.begin() + first_query(i) * width, x.begin() + first_query(i + 1) * width);
        };
        EXPECT_TRUE(test::identical(part(packed.out, row), part(each.out, row))) << "sequence " << i;
        for (int m = 0; m < 2; ++m) {
          EXPECT_TRUE(test::identical(part(packed.raw[m], row), part(each.raw[m], row))) << "sequence " << i;
          EXPECT_TRUE(test::identical(part(packed.lse[m], spec_.heads), part(each.lse[m], spec_.heads))) << "sequence " << i;
        }
      }
    }
  }
  void verify() { verify(reference::attention(for_reference())); }

 private:
  static test::spec sized(test::spec s, const sequences& all, index_t more_keys) {
    s.batch = 1, s.q_len = 0, s.kv_len = more_keys;
    for (const sequence& one : all) s.q_len += one.queries, s.kv_len += one.keys;
    return s;
  }

  sequences all_;
  test::spec spec_;
  test::problem<T> problem_;
  std::vector<std::int32_t> query_starts_, key_starts_;
  std::vector<index_t> prefixes_;
};

test::spec spec_of(index_t d, index_t width) {
  test::spec s;
  s.heads = 4, s.kv = 2, s.d = d, s.width = width, s.lambda = test::coefficient::per_token;
  return s;
}

const sequences layouts[] = {
    {{5, 9}},
    {{3, 5}, {0, 4}, {2, 0}, {0, 0}, {7, 7}, {1, 9}, {6, 2}},  // nothing; keys without queries and the reverse; more queries
    {{0, 0}, {0, 3}, {4, 4}, {0, 0}},
    {{0, 0}},
    {{0, 6}, {0, 0}},
    {{3, 0}, {2, 0}},
    {{33, 33}, {1, 129}, {64, 64}, {31, 95}, {2, 1}},
    {{70, 200}, {40, 33}, {9, 300}},
};

template <class T>
struct Packed : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Packed, types);

TYPED_TEST(Packed, AsEachSequenceAlone) {
  for (const sequences& layout : layouts)
    for (const bool causal : {false, true})
      for (const index_t window : {attention_mask::unlimited, index_t{1}, index_t{7}, index_t{1000}})
        for (const index_t slack : {0, 5}) {
          if (!causal && window != attention_mask::unlimited) continue;
          test::spec s = spec_of(5, 6);
          s.causal = causal, s.window = window;
          packed_call<TypeParam>(s, layout, slack, slack).verify();
          if (testing::Test::HasFailure()) return;
        }
}

// A block of queries may take in many sequences, and their keys are far apart, whatever the window.
TYPED_TEST(Packed, ManySequencesOfOneQuery) {
  for (const index_t window : {attention_mask::unlimited, index_t{3}, index_t{40}}) {
    test::spec s = spec_of(4, 4);
    s.causal = true, s.window = window;
    packed_call<TypeParam>(s, sequences(70, sequence{1, 61})).verify();
    packed_call<TypeParam>(s, sequences(9, sequence{2, 300})).verify();
  }
}

// Nothing that a sequence gives depends on where it lies, if its keys keep their places in parts and chunks.
TYPED_TEST(Packed, BitForBitWhereKeysAreAligned) {
  for (const bool causal : {false, true}) {
    test::spec s = spec_of(3, 2);
    s.heads = s.kv = 1, s.causal = causal;
    packed_call<TypeParam>(s, {{3, 1024}, {2, 2048}, {0, 0}, {5, 1024}, {4, 60}}).verify();
    packed_call<TypeParam>(s, {{3, 128}, {40, 256}, {35, 128}, {5, 0}, {33, 60}}, 128, 3).verify();
  }
}

TYPED_TEST(Packed, OneSequenceIsNotPacked) {
  for (const bool causal : {false, true})
    for (const index_t queries : {1, 8, 40}) {
      test::spec s = spec_of(5, 7);
      s.causal = causal, s.window = causal ? 30 : attention_mask::unlimited;
      packed_call<TypeParam> call(s, {{queries, 70}});
      for (const schedule_choice schedule : {schedule_choice::automatic, schedule_choice::panels, schedule_choice::stream}) {
        call.args().schedule = schedule;
        ASSERT_EQ(test::run(call.args()), status::ok);
        const auto packed = call.problem().outputs();
        ASSERT_EQ(test::run(call.alone(0)), status::ok);
        call.problem().expect_identical(packed, call.problem().outputs());
      }
    }
}

// The offset counts within a sequence; the reference does not know that, but a sequence alone does.
TYPED_TEST(Packed, ExplicitOffset) {
  for (const index_t offset : {-3, 0, 2, 50, -100})
    for (const index_t window : {attention_mask::unlimited, index_t{4}}) {
      test::spec s = spec_of(4, 4);
      s.causal = true, s.window = window, s.offset = offset;
      packed_call<TypeParam> call(s, {{3, 128}, {6, 128}, {40, 1024 - 256}, {0, 1024}, {5, 9}});
      for (const schedule_choice schedule : test::both_schedules) {
        SCOPED_TRACE(test::name(schedule));
        call.args().schedule = schedule;
        ASSERT_EQ(test::run(call.args()), status::ok);
        const auto packed = call.problem().outputs();
        for (std::size_t i = 0; i < 5; ++i) {
          ASSERT_EQ(test::run(call.alone(i)), status::ok);
        }
        const auto each = call.problem().outputs();
        if (schedule == schedule_choice::panels)
          call.problem().expect_identical(packed, each);
        else  // within a few roundings of weighted means of numbers of size 1
          for (std::size_t e = 0; e < each.out.size(); ++e)
            ASSERT_NEAR(packed.out[e], each.out[e], 64 * test::epsilon<TypeParam>()) << e;
      }
    }
}

TYPED_TEST(Packed, NanStaysInItsSequence) {
  using T = TypeParam;
  const sequences layout = {{3, 40}, {20, 33}, {2, 2}, {9, 70}};
  for (const bool causal : {false, true})
    for (std::size_t poisoned = 0; poisoned < layout.size(); ++poisoned)
      for (const schedule_choice schedule : test::both_schedules) {
        test::spec s = spec_of(4, 5);
        s.causal = causal;
        packed_call<T> call(s, layout);
        call.poison_key(call.first_key(poisoned));  // the first key is seen by all queries of the sequence
        call.args().schedule = schedule;
        ASSERT_EQ(test::run(call.args()), status::ok);
        const std::vector<T> out = call.problem().out.values();
        const index_t row = s.heads * call.args().out.width;
        for (std::size_t e = 0; e < out.size(); ++e) {
          const index_t query = static_cast<index_t>(e) / row;
          const bool own = query >= call.first_query(poisoned) && query < call.first_query(poisoned + 1);
          ASSERT_EQ(std::isnan(out[e]), own) << "query " << query << ", sequence " << poisoned << ", " << test::name(schedule);
        }
      }
}

TYPED_TEST(Packed, RandomSequences) {
  using T = TypeParam;
  test::random_source random(31);
  for (int i = 0; i < 80; ++i) {
    sequences all;
    for (index_t n = random.integer(1, 7); n > 0; --n) {
      const index_t most = random.pick<index_t>({0, 1, 5, 40, 150});
      sequence one{random.integer(0, random.pick<index_t>({0, 1, 5, 40})), random.integer(0, most)};
      one.prefix = random.coin() ? 0 : random.integer(0, one.keys);
      all.push_back(one);
    }
    test::spec s = spec_of(random.integer(1, 18), random.integer(1, 18));
    s.seed = 500 + static_cast<std::uint64_t>(i), s.causal = random.coin();
    if (s.causal && random.coin()) s.window = random.integer(1, 60);
    s.norm = random.coin() ? diffattn::norm_kind::rms : diffattn::norm_kind::none;
    packed_call<T> call(s, all, random.integer(0, 3), random.integer(0, 3));
    reference::problem<T> r = call.for_reference();
    std::vector<T> bias, slopes;
    const bool biased = random.coin(), sloped = random.coin();
    if (biased) {
      for (index_t e = 0; e < r.q_len * r.kv_len; ++e)
        bias.push_back(random.integer(0, 4) == 0 ? -std::numeric_limits<T>::infinity() : static_cast<T>(random.normal()));
      call.args().logits.bias = {bias.data(), 0, 0, r.kv_len, 1};
    }
    if (sloped) {
      slopes = {T(0.5), T(0.25), T(0.125), T(0)};
      call.args().logits.slopes = slopes.data();
    }
    r.added = [&](int, long, long h, long row, long key) {
      double sum = biased ? double(bias[static_cast<std::size_t>(row * r.kv_len + key)]) : 0;
      for (std::size_t q = 0; sloped && q < all.size(); ++q)
        if (row >= r.q_starts[q] && row < r.q_starts[q + 1])
          sum -= double(slopes[static_cast<std::size_t>(h)]) *
                 double(std::labs(r.k_starts[q + 1] - r.q_starts[q + 1] + row - key));
      return sum;
    };
    call.verify(reference::attention(r));
    if (testing::Test::HasFailure()) return;
  }
}

// Prefix-LM: some first keys are seen by all queries, whatever lies between.
template <class T>
struct Prefix : testing::Test {
  static void verify(const test::spec& s, const std::vector<index_t>& prefixes) {
    SCOPED_TRACE(s.text() + ", prefix " + std::to_string(prefixes[0]));
    test::problem<T> p(s);
    p.args().mask.prefixes = prefixes.data();
    reference::problem<T> r = p.for_reference();
    r.prefix.assign(prefixes.begin(), prefixes.end());
    const reference::result expected = reference::attention(r);
    test::for_each_way(p.args(), [&](const forward_args<T>& way) {
      const status st = test::run(way);
      ASSERT_EQ(st, status::ok) << message(st);
      p.expect_near(p.outputs(), expected);
    });
  }
};
TYPED_TEST_SUITE(Prefix, types);

TYPED_TEST(Prefix, OfEveryLength) {
  for (const index_t q_len : {1, 5, 40})
    for (const index_t kv_len : {5, 40, 140})
      for (const index_t window : {attention_mask::unlimited, index_t{1}, index_t{12}})
        for (const index_t prefix : {index_t{0}, index_t{1}, kv_len / 2, kv_len - 1, kv_len})
          for (const bool ranges : {false, true}) {
            test::spec s = spec_of(4, 5);
            s.heads = 2, s.kv = 1, s.batch = 2, s.q_len = q_len, s.kv_len = kv_len, s.causal = true, s.window = window;
            s.ranges = ranges, s.seed = static_cast<std::uint64_t>(kv_len + prefix + 1);
            TestFixture::verify(s, {prefix, kv_len - prefix});
            if (testing::Test::HasFailure()) return;
          }
}

TYPED_TEST(Prefix, OffsetsAndCachedTokens) {
  for (const index_t offset : {-40, -3, 0, 7, 200})
    for (const index_t window : {attention_mask::unlimited, index_t{9}})
      for (const index_t prefix : {0, 1, 33, 60}) {
        test::spec s = spec_of(4, 5);
        s.heads = 2, s.kv = 1, s.q_len = 35, s.kv_len = 60, s.causal = true, s.offset = offset, s.window = window;
        TestFixture::verify(s, {prefix});
        if (testing::Test::HasFailure()) return;
      }
}

// All of a prefix is as good as no causal mask, and none of it changes no bit.
TYPED_TEST(Prefix, AllOrNothing) {
  using T = TypeParam;
  for (const schedule_choice schedule : test::both_schedules) {
    test::spec s = spec_of(4, 5);
    s.q_len = 40, s.kv_len = 150, s.causal = true;
    const index_t none[] = {0}, all[] = {150};
    test::problem<T> p(s);
    p.args().schedule = schedule;
    for (const bool whole : {false, true}) {
      p.args().mask.causal = true, p.args().mask.prefixes = whole ? all : none;
      ASSERT_EQ(test::run(p.args()), status::ok);
      const auto with = p.outputs();
      p.args().mask.causal = !whole, p.args().mask.prefixes = nullptr;
      ASSERT_EQ(test::run(p.args()), status::ok);
      p.expect_identical(with, p.outputs());
    }
  }
}

}  // namespace
