// SPDX-License-Identifier: MIT
// Decoding from caches. The same call on plain tensors is the yardstick: bit for bit if the storage is the computing type,
// within the reference's bound on the stored numbers otherwise.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "support/problem.hpp"

namespace {

using diffattn::attention_mask;
using diffattn::index_t;
using diffattn::kv_cache_kind;
using diffattn::schedule_choice;
using diffattn::status;
using diffattn::storage;
using test::all_caches;
using test::both_schedules;
using test::cache_choice;
using test::family;
using test::float_storages;
using test::name;
using test::owned_cache;
using test::problem;
using test::spec;

constexpr index_t unlimited = attention_mask::unlimited;
constexpr cache_choice pages_of_16 = {kv_cache_kind::paged, 16};

/// The call of query rows [begin, end).
template <class T>
diffattn::forward_args<T> rows(problem<T>& p, index_t begin, index_t end) {
  diffattn::forward_args<T> a = p.args();
  const auto cut = [&](auto view) {
    view.data = view.at(0, begin, 0), view.tokens = end - begin;
    return view;
  };
  a.q = cut(a.q), a.out = cut(a.out);
  if (a.out1.data) a.out1 = cut(a.out1), a.out2 = cut(a.out2);
  if (a.lse1.data) a.lse1.data = &a.lse1.at(0, begin, 0), a.lse2.data = &a.lse2.at(0, begin, 0);
  if (auto array = a.lambda.array(); array.data) {
    array.data = &array.at(0, begin, 0);
    a.lambda = diffattn::lambda_view<T>::strided(array);
  }
  return a;
}

template <class T>
void use(diffattn::forward_args<T>& a, owned_cache& cache, const index_t* sequences = nullptr) {
  a.k = a.v = {}, a.cache = cache->view(), a.sequences = sequences;
}

/// Writes what sequence b holds of tokens [begin, end) to entry b of k and v.
template <class T>
void read_back(owned_cache& cache, const problem<T>& p, index_t begin, index_t end) {
  const diffattn::kv_view view = cache->view();
  const auto read = [&](const diffattn::kv_rows& from, const test::tensor<T>& to) {
    for (index_t b = 0; b < to.view().batch; ++b)
      for (index_t t = begin; t < end; ++t)
        for (index_t h = 0; h < from.heads; ++h)
          for (index_t c = 0; c < from.width; ++c)
            to.at(b, t, h, c) = static_cast<T>(test::stored_number(from.type, test::stored_row(view, from, b, t, h), c));
  };
  read(view.keys, p.k), read(view.values, p.v);
}

template <class T>
bool is_exact(storage keys, storage values) {
  return keys == diffattn::storage_of<T> && values == diffattn::storage_of<T>;
}

/// How a cache is filled and read.
struct loop {
  cache_choice cache;
  storage keys, values;
  schedule_choice schedule;
  std::vector<index_t> pieces;  ///< tokens of the calls, over and over
};

/// `s` is causal, its queries are the last tokens. The tokens before them come as one prompt, then pieces of them are appended
/// and asked; in the end all rows are compared with one call on tensors that hold what the cache stored.
template <class T>
void expect_decode_equals_prefill(const spec& s, const loop& l) {
  SCOPED_TRACE(s.text() + "; " + l.cache.text() + ", " + name(l.keys) + " and " + name(l.values) + ", " + name(l.schedule) +
               ", pieces of " + std::to_string(l.pieces[0]) + " …");
  problem<T> p(s), stored(s);
  p.args().schedule = stored.args().schedule = l.schedule;
  diffattn::kv_cache_config config = p.cache_config(l.cache);
  config.keys = l.keys, config.values = l.values, config.sequences = s.batch, config.capacity = s.kv_len;
  const index_t prompt = s.kv_len - s.q_len, most = *std::max_element(l.pieces.begin(), l.pieces.end());
  if (l.cache.kind == kv_cache_kind::ring && s.window != unlimited) config.capacity = s.window + most - 1;
  owned_cache cache(config);
  const auto append = [&](index_t begin, index_t end) {
    for (index_t b = 0; b < s.batch; ++b) cache.append(b, p.k.view(), p.v.view(), b, begin, end);
    read_back(cache, stored, std::max(begin, end - config.capacity), end);
  };
  append(0, prompt);
  std::size_t piece = 0;
  for (index_t t = prompt; t < s.kv_len;) {
    const index_t end = std::min(t + l.pieces[piece++ % l.pieces.size()], s.kv_len);
    append(t, end);
    diffattn::forward_args<T> a = rows(p, t - prompt, end - prompt);
    use(a, cache);
    const status error = test::run(a);
    ASSERT_EQ(error, status::ok) << message(error) << ", token " << t;
    // A workspace for the longest sequence is enough on the way there.
    for (const index_t workers : {1, 3, 16}) {
      EXPECT_LE(test::workspace_bytes(a, workers), test::workspace_bytes(a, workers, s.kv_len)) << "token " << t;
    }
    t = end;
  }
  const auto decoded = p.outputs();
  ASSERT_EQ(test::run(stored.args()), status::ok);
  if (is_exact<T>(l.keys, l.values))
    stored.expect_identical(decoded, stored.outputs());
  else
    stored.expect_near(decoded, reference::attention(stored.for_reference()));
  if (l.cache.kind == kv_cache_kind::ring) return;  // it does not hold all that one call would read
  diffattn::forward_args<T> whole = p.args();
  use(whole, cache);
  ASSERT_EQ(test::run(whole), status::ok);
  SCOPED_TRACE("in one call");
  p.expect_identical(p.outputs(), decoded);
}

template <class T>
void expect_decode_equals_prefill(const spec& s, const cache_choice& cache, std::vector<index_t> pieces) {
  for (const schedule_choice schedule : both_schedules)
    expect_decode_equals_prefill<T>(s, {cache, diffattn::storage_of<T>, diffattn::storage_of<T>, schedule, pieces});
}

template <class T>
struct Decode : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Decode, types);

spec small_model(index_t q_len, index_t kv_len) {
  spec s;
  s.batch = 2, s.q_len = q_len, s.kv_len = kv_len, s.d = 7, s.width = 6, s.heads = 4, s.kv = 2;
  s.causal = true, s.norm = diffattn::norm_kind::rms, s.q_amplitude = 3;
  return s;
}

TYPED_TEST(Decode, InPiecesOfAnySize) {
  for (const cache_choice& cache : all_caches)
    for (const std::vector<index_t>& pieces : {std::vector<index_t>{1}, {2, 3, 4, 5}, {17, 1, 33}})
      for (const index_t prompt : {index_t{0}, index_t{1}, index_t{31}, index_t{64}})
        for (const index_t window : {unlimited, index_t{20}}) {
          spec s = small_model(23, prompt + 23);
          s.batch = 1, s.lambda = test::coefficient::per_token, s.window = window;
          expect_decode_equals_prefill<TypeParam>(s, cache, pieces);
        }
}

TYPED_TEST(Decode, RingsWrapAnywhere) {
  for (const index_t window : {1, 2, 7, 31, 32, 33, 64})
    for (const std::vector<index_t>& pieces : {std::vector<index_t>{1}, {3}, {2, 5}}) {
      spec s = small_model(0, 4 * window + 9);
      s.q_len = s.kv_len, s.window = window;
      expect_decode_equals_prefill<TypeParam>(s, test::ring, pieces);
    }
}

// Parts of 1024 keys, tails of 1 mod 32, and rings far beyond their capacity.
TYPED_TEST(Decode, LongContexts) {
  for (const index_t kv_len : {1023, 1024, 1025, 1057, 2049, 2081})
    for (const cache_choice& cache : all_caches)
      for (const index_t window : {unlimited, index_t{100}, index_t{1025}}) {
        if (window != unlimited && cache.kind != kv_cache_kind::ring) continue;
        spec s = small_model(6, kv_len);
        s.batch = 1, s.d = 4, s.width = 3, s.window = window, s.seed = static_cast<std::uint64_t>(kv_len);
        expect_decode_equals_prefill<TypeParam>(s, cache, {1, 2, 3});
      }
}

TEST(DecodeStored, EveryPairOfTypes) {
  for (const storage keys : float_storages)
    for (const storage values : float_storages)
      for (const family f : {family::interleaved, family::halves, family::grouped, family::shared})
        for (const cache_choice& cache : {test::contiguous, test::ring, pages_of_16})
          for (const schedule_choice schedule : both_schedules) {
            spec s = small_model(9, 42);
            s.batch = 1, s.d = 36, s.width = 33, s.heads_family = f, s.ratio = f == family::grouped ? 2 : 1;
            if (cache.kind == kv_cache_kind::ring) s.window = 20;
            expect_decode_equals_prefill<float>(s, {cache, keys, values, schedule, {1, 4}});
          }
}

// Also one noise head for four signal heads, and version 2.
TEST(DecodeStored, EveryHeadMap) {
  for (const family f : test::all_families)
    for (const storage type : float_storages)
      for (const schedule_choice schedule : both_schedules) {
        spec s = small_model(5, 39);
        s.heads_family = f, s.heads = 8, s.ratio = 4, s.kv = f == family::table ? 8 : 2;
        expect_decode_equals_prefill<float>(s, {pages_of_16, type, type, schedule, {1, 4}});
      }
}

TEST(DecodeStored, Widths) {
  for (const index_t width : {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65, 80, 128, 130})
    for (const storage type : float_storages)
      for (const schedule_choice schedule : both_schedules) {
        spec s = small_model(3, 34);
        s.batch = 1, s.d = width, s.width = width, s.heads = 3, s.kv = 1;
        expect_decode_equals_prefill<float>(s, {pages_of_16, type, type, schedule, {1, 2}});
      }
}

TEST(DecodeStored, LongContexts) {
  for (const index_t kv_len : {1023, 1025, 2049})
    for (const storage type : float_storages)
      for (const schedule_choice schedule : both_schedules) {
        spec s = small_model(5, kv_len);
        s.batch = 1, s.d = 12, s.width = 20;
        expect_decode_equals_prefill<float>(s, {{kv_cache_kind::paged, 64}, type, type, schedule, {1, 3}});
      }
}

// Key ranges, explicit offsets and no causal rule, on stored numbers.
TEST(DecodeStored, Masks) {
  test::random_source random(8);
  for (int sample = 0; sample < 150; ++sample) {
    spec s = small_model(random.integer(1, 6), random.integer(1, 90));
    s.seed = static_cast<std::uint64_t>(sample), s.causal = random.coin(), s.ranges = random.coin();
    if (s.causal && random.coin()) s.window = random.integer(1, 40);
    if (s.causal && random.coin()) s.offset = random.integer(-s.q_len, s.kv_len);
    problem<float> p(s), stored(s);
    diffattn::kv_cache_config config =
        p.cache_config(random.pick({test::contiguous, pages_of_16, cache_choice{kv_cache_kind::paged, 1}}));
    config.keys = float_storages[random.integer(0, 4)], config.values = float_storages[random.integer(0, 4)];
    config.sequences = s.batch;
    owned_cache cache(config);
    cache.append_in_turns({0, 1}, p.k.view(), p.v.view());
    read_back(cache, stored, 0, s.kv_len);
    const reference::result r = reference::attention(stored.for_reference());
    for (const schedule_choice schedule : both_schedules) {
      SCOPED_TRACE(s.text() + ", " + name(config.keys) + " and " + name(config.values) + ", " + name(schedule));
      diffattn::forward_args<float> a = p.args();
      a.schedule = schedule;
      use(a, cache);
      ASSERT_EQ(test::run(a), status::ok);
      p.expect_near(p.outputs(), r);
    }
  }
}

// A number that nobody may see can be anything; int8 and q6 make a NaN of its whole row.
// A workspace for the longest sequence is enough for any mask on the way there.
TEST(DecodeStored, WorkspaceForAnyMask) {
  test::random_source random(31);
  for (int trial = 0; trial < 3000; ++trial) {
    spec s;
    s.q_len = random.integer(1, 40), s.kv_len = random.integer(1, 3000), s.d = 4, s.width = 4, s.heads = 1, s.kv = 1;
    s.causal = trial % 4 != 0;
    problem<float> p(s);
    owned_cache cache(p.cache_config({kv_cache_kind::contiguous, 0}));
    const std::vector<index_t> sequences = {0};
    cache.append_in_turns(sequences, p.k.view(), p.v.view());
    diffattn::forward_args<float> a = p.cached(cache, sequences);
    a.schedule = trial % 2 == 0 ? schedule_choice::panels : schedule_choice::stream;
    const index_t begin = random.integer(0, s.kv_len), prefix = random.integer(0, s.kv_len);
    const diffattn::key_range range{begin, random.integer(begin, s.kv_len)};
    const auto coin = [&random] { return random.integer(0, 1) == 1; };
    if (coin()) a.mask.offset = random.integer(-50, s.kv_len + 50);
    if (s.causal && coin()) a.mask.window = random.integer(1, s.kv_len);
    if (s.causal && coin()) a.mask.prefixes = &prefix;
    if (coin()) a.mask.key_ranges = &range;
    for (const index_t workers : {1, 3})
      for (const index_t longest : {s.kv_len, s.kv_len + 1, 2 * s.kv_len})
        ASSERT_LE(test::workspace_bytes(a, workers), test::workspace_bytes(a, workers, longest))
            << s.text() << ", trial " << trial << ", offset " << a.mask.offset << ", window " << a.mask.window;
  }
}

TEST(DecodeStored, MaskedNumbersNeverMatter) {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()};
  for (const storage type : float_storages)
    for (const cache_choice& choice : {test::contiguous, pages_of_16, cache_choice{kv_cache_kind::paged, 1}})
      for (const index_t kv_len : {70, 1100})
        for (const schedule_choice schedule : both_schedules) {
          spec s = small_model(4, kv_len);
          s.batch = 1, s.window = 21, s.offset = kv_len - 9, s.ranges = true;
          problem<float> clean(s), dirty(s);
          clean.ranges()[0] = dirty.ranges()[0] = {kv_len - 25, kv_len - 6};
          const auto reference = clean.for_reference();
          int next = 0;
          for (index_t j = 0; j < kv_len; ++j) {
            bool live = false;
            for (index_t i = 0; i < s.q_len; ++i) live |= reference.allowed(0, i, j);
            if (live) continue;
            for (index_t h = 0; h < 4; ++h) dirty.k.at(0, j, h, next % s.d) = bad[next % 2], ++next;
            for (index_t h = 0; h < 2; ++h) dirty.v.at(0, j, h, next % s.width) = bad[next % 2];
          }
          problem<float>::results results[2];
          for (const bool is_dirty : {false, true}) {
            problem<float>& p = is_dirty ? dirty : clean;
            diffattn::kv_cache_config config = p.cache_config(choice);
            config.keys = config.values = type, config.sequences = 1;
            owned_cache cache(config);
            cache.append_in_turns({0}, p.k.view(), p.v.view());
            diffattn::forward_args<float> a = p.args();
            a.schedule = schedule;
            use(a, cache);
            ASSERT_EQ(test::run(a), status::ok);
            results[is_dirty ? 1 : 0] = p.outputs();
          }
          SCOPED_TRACE(std::string(name(type)) + ", " + choice.text() + ", " + name(schedule));
          clean.expect_identical(results[1], results[0]);
          for (const float x : results[0].out) ASSERT_TRUE(std::isfinite(x));
        }
}

// Whatever the storage, two equal maps are equal: also over several parts with maxima that rise.
TEST(DecodeStored, EqualMapsCancelExactly) {
  for (const storage type : float_storages)
    for (const index_t kv_len : {33, 1025, 2100})
      for (const schedule_choice schedule : both_schedules) {
        spec s = small_model(2, kv_len);
        s.batch = 1, s.heads = 2, s.kv = 1, s.lambda_value = 1, s.raw = false;
        problem<float> p(s);
        for (index_t c = 0; c < s.d; ++c) {
          for (index_t t = 0; t < s.q_len; ++t)
            for (index_t h = 0; h < 4; h += 2) p.q.at(0, t, h + 1, c) = p.q.at(0, t, h, c);
          for (index_t t = 0; t < kv_len; ++t) p.k.at(0, t, 1, c) = p.k.at(0, t, 0, c) *= 1 + static_cast<float>(t) / 100;
        }
        diffattn::kv_cache_config config = p.cache_config(pages_of_16);
        config.keys = config.values = type, config.sequences = 1;
        owned_cache cache(config);
        cache.append(0, p.k.view(), p.v.view(), 0, 0, kv_len);
        diffattn::forward_args<float> a = p.args();
        a.schedule = schedule;
        use(a, cache);
        ASSERT_EQ(test::run(a), status::ok);
        for (const float x : p.out.values()) ASSERT_EQ(x, 0) << name(type) << ", " << kv_len << ", " << name(schedule);
      }
}

// Standard attention on every second key head of the same cache.
TEST(DecodeStored, LambdaZeroIsStandardAttention) {
  for (const storage type : float_storages)
    for (const index_t kv_len : {50, 1030})
      for (const schedule_choice schedule : both_schedules) {
        spec s = small_model(3, kv_len);
        s.norm = diffattn::norm_kind::none, s.lambda_value = 0, s.raw = false;
        problem<float> p(s);
        diffattn::kv_cache_config config = p.cache_config(pages_of_16);
        config.keys = config.values = type, config.sequences = s.batch;
        owned_cache cache(config);
        cache.append_in_turns({0, 1}, p.k.view(), p.v.view());
        diffattn::forward_args<float> f = p.args();
        f.schedule = schedule;
        use(f, cache);
        ASSERT_EQ(test::run(f), status::ok);
        const auto differential = p.outputs();
        diffattn::attention_args<float> a;
        a.q = f.q, a.q.heads /= 2, a.q.head_stride *= 2, a.out = f.out, a.mask = f.mask, a.schedule = schedule, a.lse = f.lse1;
        a.cache = f.cache, a.cache.heads = {}, a.cache.keys.heads /= 2, a.cache.keys.head_stride *= 2;
        ASSERT_EQ(test::run(a), status::ok);
        SCOPED_TRACE(std::string(name(type)) + ", " + name(schedule));
        p.expect_identical(p.outputs(), differential);
      }
}

/// Sequences of different lengths in one call: each row as if its sequence were alone.
template <class T>
void expect_batch_equals_single_calls(const std::vector<index_t>& lengths, const std::vector<index_t>& sequences, index_t q_len,
                                      const cache_choice& choice, schedule_choice schedule, bool causal) {
  SCOPED_TRACE(choice.text() + ", " + name(schedule) + ", " + std::to_string(q_len) + " queries");
  const index_t batch = static_cast<index_t>(sequences.size());
  const index_t longest = std::max(index_t{1}, *std::max_element(lengths.begin(), lengths.end()));
  spec s = small_model(q_len, longest);
  s.batch = batch, s.causal = causal;
  problem<T> together(s);
  diffattn::kv_cache_config config = together.cache_config(choice);
  config.kind = choice.kind, config.sequences = static_cast<index_t>(lengths.size()), config.capacity = longest;
  owned_cache cache(config);
  for (index_t begin = 0; begin < longest; begin += 13)  // in turns
    for (index_t b = 0; b < batch; ++b) {
      const index_t i = sequences[static_cast<std::size_t>(b)], end = lengths[static_cast<std::size_t>(i)];
      if (begin < end) cache.append(i, together.k.view(), together.v.view(), b, begin, std::min(begin + 13, end));
    }
  together.args().schedule = schedule;
  diffattn::forward_args<T> a = together.args();
  use(a, cache, sequences.data());
  ASSERT_EQ(test::run(a), status::ok);
  const auto all = together.outputs();
  for (index_t b = 0; b < batch; ++b) {
    diffattn::forward_args<T> one = together.args();
    const auto entry = [b](auto view) {
      view.data = view.at(b, 0, 0), view.batch = 1;
      return view;
    };
    one.q = entry(one.q), one.k = entry(one.k), one.v = entry(one.v), one.out = entry(one.out);
    one.out1 = entry(one.out1), one.out2 = entry(one.out2);
    one.lse1.data = &one.lse1.at(b, 0, 0), one.lse2.data = &one.lse2.at(b, 0, 0);
    one.k.tokens = one.v.tokens = lengths[static_cast<std::size_t>(sequences[static_cast<std::size_t>(b)])];
    ASSERT_EQ(test::run(one), status::ok);
  }
  together.expect_identical(all, together.outputs());
}

TYPED_TEST(Decode, BatchesOfDifferentLengths) {
  for (const cache_choice& choice : all_caches)
    for (const schedule_choice schedule : both_schedules)
      for (const index_t q_len : {1, 3})
        for (const bool causal : {false, true}) {
          expect_batch_equals_single_calls<TypeParam>({5, 0, 33, 64, 1, 130}, {0, 1, 2, 3, 4, 5}, q_len, choice, schedule,
                                                      causal);
          expect_batch_equals_single_calls<TypeParam>({5, 0, 33, 64, 1, 130}, {3, 1, 5, 0}, q_len, choice, schedule, causal);
          expect_batch_equals_single_calls<TypeParam>({7, 1200, 3000}, {2, 0, 1}, q_len, choice, schedule, causal);
          expect_batch_equals_single_calls<TypeParam>({0, 0}, {1}, q_len, choice, schedule, causal);
        }
}

// One sequence may be asked twice in a call, by different queries.
TYPED_TEST(Decode, OneSequenceForAllEntries) {
  spec s = small_model(2, 40);
  for (const schedule_choice schedule : both_schedules) {
    problem<TypeParam> p(s);
    p.args().schedule = schedule;
    owned_cache cache(p.cache_config(pages_of_16));
    cache.append(1, p.k.view(), p.v.view(), 0, 0, s.kv_len);
    const index_t sequences[] = {1, 1};
    diffattn::forward_args<TypeParam> a = p.args();
    use(a, cache, sequences);
    ASSERT_EQ(test::run(a), status::ok);
    const auto cached = p.outputs();
    p.args().k.batch_stride = p.args().v.batch_stride = 0;
    ASSERT_EQ(test::run(p.args()), status::ok);
    p.expect_identical(cached, p.outputs());
  }
}

// Speculation: wrong tokens are asked, forgotten and replaced.
TYPED_TEST(Decode, TruncateAndGoOn) {
  for (const cache_choice& choice : all_caches)
    for (const schedule_choice schedule : both_schedules) {
      spec s = small_model(60, 60);
      s.window = 30;
      problem<TypeParam> p(s), wrong([&s] {
        spec other = s;
        other.seed = 99;
        return other;
      }());
      p.args().schedule = wrong.args().schedule = schedule;
      diffattn::kv_cache_config config = p.cache_config(choice);
      config.capacity = choice.kind == kv_cache_kind::ring ? s.window + 4 + 4 - 1 : s.kv_len + 4, config.sequences = s.batch;
      owned_cache cache(config);
      for (index_t t = 0; t < s.q_len; ++t) {
        const index_t guess = std::min(t + 4, s.q_len);
        for (index_t b = 0; b < s.batch; ++b) cache.append(b, wrong.k.view(), wrong.v.view(), b, t, guess);
        diffattn::forward_args<TypeParam> a = rows(wrong, t, guess);
        use(a, cache);
        ASSERT_EQ(test::run(a), status::ok);
        for (index_t b = 0; b < s.batch; ++b) {
          ASSERT_EQ(cache->truncate(b, t), status::ok);
          cache.append(b, p.k.view(), p.v.view(), b, t, t + 1);
        }
        a = rows(p, t, t + 1);
        use(a, cache);
        ASSERT_EQ(test::run(a), status::ok) << choice.text() << ", token " << t;
      }
      const auto decoded = p.outputs();
      ASSERT_EQ(test::run(p.args()), status::ok);
      SCOPED_TRACE(choice.text() + ", " + name(schedule));
      p.expect_identical(decoded, p.outputs());
    }
}

// A common prompt in common pages, then three continuations.
TYPED_TEST(Decode, ForksShareTheirPrompt) {
  for (const index_t page_tokens : {1, 16, 64})
    for (const index_t prompt : {1, 15, 16, 17, 70})
      for (const schedule_choice schedule : both_schedules) {
        spec s = small_model(5, prompt + 5);
        s.batch = 3;
        problem<TypeParam> p(s);
        p.args().schedule = schedule;
        for (index_t b = 1; b < 3; ++b)
          for (index_t t = 0; t < prompt; ++t) {
            for (index_t h = 0; h < 4; ++h) std::copy_n(&p.k.at(0, t, h, 0), s.d, &p.k.at(b, t, h, 0));
            for (index_t h = 0; h < 2; ++h) std::copy_n(&p.v.at(0, t, h, 0), s.width, &p.v.at(b, t, h, 0));
          }
        diffattn::kv_cache_config config = p.cache_config({kv_cache_kind::paged, page_tokens});
        config.sequences = 3;
        owned_cache cache(config);
        cache.append(0, p.k.view(), p.v.view(), 0, 0, prompt);
        ASSERT_EQ(cache->fork(0, 2), status::ok);
        ASSERT_EQ(cache->fork(2, 1), status::ok);
        for (index_t t = 0; t < 5; ++t) {
          for (const index_t b : {1, 0, 2}) cache.append(b, p.k.view(), p.v.view(), b, prompt + t, prompt + t + 1);
          diffattn::forward_args<TypeParam> a = rows(p, t, t + 1);
          use(a, cache);
          ASSERT_EQ(test::run(a), status::ok);
        }
        const auto decoded = p.outputs();
        ASSERT_EQ(test::run(p.args()), status::ok);
        SCOPED_TRACE(std::to_string(page_tokens) + " tokens a page, prompt of " + std::to_string(prompt));
        p.expect_identical(decoded, p.outputs());
      }
}

// Another layer's cache, known by its view alone: in one piece of memory that may only be read.
TYPED_TEST(Decode, ViewsOfAnotherLayer) {
  spec s = small_model(3, 50);
  problem<TypeParam> p(s);
  owned_cache cache(p.cache_config(pages_of_16));
  cache.append_in_turns({2, 0}, p.k.view(), p.v.view());
  const diffattn::kv_view view = cache->view();
  const std::vector<unsigned char> before = cache.memory();
  const index_t sequences[] = {2, 0};
  for (const schedule_choice schedule : both_schedules)
    for (const std::uint64_t layer : {2u, 3u}) {
      spec other = s;
      other.seed = layer;
      problem<TypeParam> reader(other);  // queries of its own
      reader.args().schedule = schedule;
      diffattn::forward_args<TypeParam> a = reader.args();
      a.k = a.v = {}, a.cache = view, a.sequences = sequences;
      ASSERT_EQ(test::run(a), status::ok);
      const auto cached = reader.outputs();
      a.cache = {}, a.sequences = nullptr, a.k = p.args().k, a.v = p.args().v;
      ASSERT_EQ(test::run(a), status::ok);
      reader.expect_identical(cached, reader.outputs());
    }
  EXPECT_TRUE(cache.memory() == before);
}

// Pages of an engine: no head map, null tables and lengths, rows far apart and not aligned for their type.
TEST(DecodeViews, OfForeignMemory) {
  spec s = small_model(3, 40);
  problem<float> p(s);
  for (const std::size_t shift : {0u, 1u, 2u, 4u})
    for (const schedule_choice schedule : both_schedules) {
      std::vector<unsigned char> memory(1 << 16, 0xff);
      diffattn::kv_view view;
      view.sequences = view.pages = 2, view.page_tokens = s.kv_len;
      unsigned char* next = memory.data() + shift;
      const auto copy = [&](const diffattn::tensor_view<const float>& t) {
        const index_t row = 4 * t.width + 12;
        const diffattn::kv_rows to{next, storage::f32, t.heads, t.width, -t.heads * t.tokens * row, row, t.heads * row};
        diffattn::kv_rows r = to;
        r.data = next + (t.batch - 1) * t.heads * t.tokens * row;  // entries backwards
        for (index_t b = 0; b < t.batch; ++b)
          for (index_t i = 0; i < t.tokens; ++i)
            for (index_t h = 0; h < t.heads; ++h)
              std::memcpy(const_cast<unsigned char*>(r.at(b, h, i)), t.at(b, i, h), static_cast<std::size_t>(4 * t.width));
        next += t.batch * t.heads * t.tokens * row;
        return r;
      };
      p.args().schedule = schedule;
      ASSERT_EQ(test::run(p.args()), status::ok);
      const auto plain = p.outputs();
      view.keys = copy(p.args().k), view.values = copy(p.args().v);
      diffattn::forward_args<float> a = p.args();
      a.k = a.v = {}, a.cache = view;
      ASSERT_EQ(test::run(a), status::ok);
      SCOPED_TRACE("shift " + std::to_string(shift) + ", " + name(schedule));
      p.expect_identical(p.outputs(), plain);
    }
}

}  // namespace
