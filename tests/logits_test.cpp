// SPDX-License-Identifier: MIT
// What changes logits between product and softmax, in every combination, against the reference: soft cap, ALiBi, bias, boolean
// masks, block lists, predicates, sinks; of both maps and of each. All schedules, tensors and caches. Then what a rule must not
// do: read what it hides, make a row depend on anything but itself, or fail at the ends of its numbers.

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <memory>
#include <numeric>

#include "support/elements.hpp"
#include "support/problem.hpp"

namespace {

using diffattn::forward_args;
using diffattn::index_t;
using diffattn::key_range;
using diffattn::logit_rules;
using diffattn::sight;
using diffattn::status;
using test::schedule_choice;

/// Which rules there are, and how their arrays lie.
struct choice {
  bool cap = false, slopes = false, bias = false, visible = false, blocks = false, predicate = false, sinks = false;
  bool per_head = true, per_batch = true, per_query = true, transposed = false, tiles = true;
  double hidden = 0.4;      ///< share of the keys that each hides
  index_t query_block = 0;  ///< of the block lists; 0: any
  std::string text() const {
    std::string s;
    const std::pair<bool, const char*> all[] = {{cap, "cap "},
                                                {slopes, "slopes "},
                                                {bias, "bias "},
                                                {visible, "visible "},
                                                {blocks, "blocks "},
                                                {predicate, "predicate "},
                                                {sinks, "sinks "},
                                                {per_head, "per head "},
                                                {per_batch, "per batch "},
                                                {per_query, "per query "},
                                                {transposed, "transposed "},
                                                {tiles, "tiles "}};
    for (const auto& [on, name] : all)
      if (on) s += name;
    return s;
  }
};

choice random_choice(test::random_source& random) {
  const auto coin = [&random] { return random.integer(0, 1) == 1; };
  choice c;
  c.cap = coin(), c.slopes = coin(), c.bias = coin(), c.visible = coin(), c.blocks = coin(), c.predicate = coin();
  c.sinks = coin(), c.per_head = coin(), c.per_batch = coin(), c.per_query = coin(), c.transposed = coin(), c.tiles = coin();
  c.hidden = static_cast<double>(random.integer(0, 3)) * 0.3;
  return c;
}

/// The rules of one map with what they point to, and the same for the reference.
template <class T>
class rule_set {
 public:
  rule_set(const choice& c, const test::spec& s, test::random_source& random) : choice_(c), spec_(s) {
    const index_t batch = c.per_batch ? s.batch : 1, heads = c.per_head ? s.heads : 1, queries = c.per_query ? s.q_len : 1;
    const index_t inner = c.transposed ? queries : s.kv_len, outer = c.transposed ? s.kv_len : queries;
    const auto view = [&](const auto* data) {
      using E = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
      diffattn::logit_view<E> v;
      v.data = data, v.head_stride = c.per_head ? outer * (inner + 1) : 0,
      v.batch_stride = c.per_batch ? heads * outer * (inner + 1) : 0;
      v.query_stride = !c.per_query ? 0 : c.transposed ? 1 : inner + 1, v.key_stride = c.transposed ? inner + 1 : 1;
      return v;
    };
    const std::size_t size = static_cast<std::size_t>(batch * heads * outer * (inner + 1));
    const auto hides = [&] { return random.integer(0, 999) < static_cast<index_t>(1000 * c.hidden); };
    if (c.cap) rules_.soft_cap = T(2.5);
    if (c.slopes) {
      for (index_t h = 0; h < s.heads; ++h) slopes_.push_back(static_cast<T>(0.05 * double(h + 1)));
      rules_.slopes = slopes_.data();
    }
    if (c.bias) {
      for (std::size_t i = 0; i < size; ++i)
        bias_.push_back(hides() ? -std::numeric_limits<T>::infinity() : static_cast<T>(2 * random.normal()));
      rules_.bias = view(bias_.data());
    }
    if (c.visible) {
      for (std::size_t i = 0; i < size; ++i)
        visible_.push_back(hides() ? 0 : static_cast<unsigned char>(random.integer(1, 255)));
      rules_.visible = view(visible_.data());
    }
    if (c.blocks) {
      const index_t query_block = c.query_block > 0 ? c.query_block : random.integer(1, 40), key_block = random.integer(1, 70);
      const index_t rows = (s.q_len + query_block - 1) / query_block, columns = (s.kv_len + key_block - 1) / key_block;
      for (index_t list = 0; list < batch * heads; ++list) {
        for (index_t r = 0; r < rows; ++r) {
          begins_.push_back(static_cast<index_t>(keys_.size()));
          for (index_t k = 0; k < columns; ++k)
            if (!hides()) keys_.push_back(k);
        }
        begins_.push_back(static_cast<index_t>(keys_.size()));
      }
      rules_.blocks = {query_block,
                       key_block,
                       begins_.data(),
                       keys_.data(),
                       c.per_batch ? heads * (rows + 1) : 0,
                       c.per_head ? rows + 1 : 0};
    }
    if (c.sinks) {
      for (index_t h = 0; h < s.heads; ++h)
        sinks_.push_back(h % 3 == 2 ? -std::numeric_limits<T>::infinity() : static_cast<T>(random.normal()));
      rules_.sinks = sinks_.data();
    }
  }
  rule_set(const rule_set&) = delete;

  /// The rules for a call whose first batch entry and query are these of the whole call.
  logit_rules<T> from(index_t b, index_t query) const {
    logit_rules<T> r = rules_;
    const auto move = [&](auto& v) {
      if (v.data) v.data = v.at(b, 0, query, 0);
    };
    move(r.bias), move(r.visible);
    if (r.blocks.begins) r.blocks.begins = r.blocks.row(b, 0, query);
    if (!choice_.predicate) return r;
    origins_.push_back({this, b, query});
    r.predicate.context = &origins_.back(), r.predicate.sees = sees, r.predicate.tile = choice_.tiles ? sees_tile : nullptr;
    return r;
  }
  logit_rules<T> rules() const { return from(0, 0); }

  bool shown(long b, long h, long i, long j) const {
    const auto at = [&](index_t per_b, index_t per_h, index_t per_i, index_t per_j) {
      return static_cast<std::size_t>(b * per_b + h * per_h + i * per_i + j * per_j);
    };
    const auto& v = rules_.visible;
    if (v.data && visible_[at(v.batch_stride, v.head_stride, v.query_stride, v.key_stride)] == 0) return false;
    if (choice_.predicate && !predicate(b, h, i, j)) return false;
    const diffattn::block_list& l = rules_.blocks;
    if (!l.begins) return true;
    const std::size_t row = static_cast<std::size_t>(b * l.batch_stride + h * l.head_stride + i / l.query_block);
    for (index_t k = begins_[row]; k < begins_[row + 1]; ++k)
      if (keys_[static_cast<std::size_t>(k)] == j / l.key_block) return true;
    return false;
  }
  double added(long b, long h, long i, long j, long own) const {
    double sum = 0;
    if (!slopes_.empty()) sum -= double(slopes_[static_cast<std::size_t>(h)]) * double(std::labs(own - j));
    const auto& v = rules_.bias;
    if (v.data)
      sum += double(
          bias_[static_cast<std::size_t>(b * v.batch_stride + h * v.head_stride + i * v.query_stride + j * v.key_stride)]);
    return sum;
  }
  std::vector<double> sinks() const { return {sinks_.begin(), sinks_.end()}; }

 private:
  /// A band with holes, so that there are tiles of every kind.
  bool predicate(long b, long h, long i, long j) const { return (i / 33 + j / 40 + h + b) % 3 != 0 && (i + j) % 7 != 3; }

  struct origin {
    const rule_set* self;
    index_t b, query;
  };
  static bool sees(const void* o, index_t b, index_t h, index_t i, index_t j) {
    const origin& at = *static_cast<const origin*>(o);
    return at.self->predicate(at.b + b, h, at.query + i, j);
  }
  static sight sees_tile(const void* o, index_t b, index_t h, index_t first, index_t last, key_range keys) {
    bool some = false, all = true;
    for (index_t i = first; i <= last; ++i)
      for (index_t j = keys.begin; j < keys.end; ++j) (sees(o, b, h, i, j) ? some : all) = sees(o, b, h, i, j);
    return all ? sight::all : some ? sight::some : sight::none;
  }

  choice choice_;
  test::spec spec_;
  mutable std::deque<origin> origins_;
  logit_rules<T> rules_;
  std::vector<T> slopes_, bias_, sinks_;
  std::vector<unsigned char> visible_;
  std::vector<index_t> begins_, keys_;
};

template <class T>
void verify(const test::spec& s, const choice& c1, const choice& c2, bool separate) {
  SCOPED_TRACE(s.text() + "; " + c1.text() + (separate ? "/ " + c2.text() : ""));
  test::random_source random(s.seed);
  test::problem<T> p(s);
  const rule_set<T> first(c1, s, random), second(c2, s, random);
  const logit_rules<T> rules_2 = second.rules();
  p.args().logits = first.rules();
  if (separate) p.args().logits_2 = &rules_2;
  reference::problem<T> r = p.for_reference();
  const rule_set<T>* const of_map[2] = {&first, separate ? &second : &first};
  r.shown = [&](int m, long b, long h, long i, long j) { return of_map[m]->shown(b, h, i, j); };
  r.added = [&](int m, long b, long h, long i, long j) { return of_map[m]->added(b, h, i, j, i + r.offset); };
  for (int m = 0; m < 2; ++m) r.cap[m] = double(of_map[m]->rules().soft_cap), r.sink[m] = of_map[m]->sinks();
  p.verify(reference::attention(r));
}

TEST(Logits, RandomRulesOfBothMaps) {
  test::random_source random(7);
  for (int i = 0; i < 150; ++i) {
    test::spec s;
    s.seed = 100 + static_cast<std::uint64_t>(i);
    s.batch = random.integer(1, 2), s.heads = random.integer(1, 2) * 2, s.kv = s.heads / 2;
    const index_t sizes[] = {1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 127, 129, 150};
    s.q_len = sizes[random.integer(0, 12)], s.kv_len = sizes[random.integer(0, 12)];
    // Heads that share keys, values, and a noise head for several signal heads, each with rules of its own.
    s.heads_family = random.pick({test::family::interleaved, test::family::grouped, test::family::grouped_shared,
                                  test::family::shared, test::family::halves, test::family::table});
    if (s.heads_family == test::family::grouped || s.heads_family == test::family::grouped_shared) s.ratio = 2;
    if (s.heads_family == test::family::table) s.kv = s.heads;
    s.d = random.integer(1, 20), s.width = random.integer(1, 20);
    s.causal = random.integer(0, 1) == 1;
    if (s.causal && random.integer(0, 2) == 0) s.window = random.integer(1, 100);
    s.ranges = random.integer(0, 2) == 0;
    const choice c1 = random_choice(random), c2 = random_choice(random);
    const bool separate = random.integer(0, 1) == 1;
    verify<float>(s, c1, c2, separate);
    if (i % 3 == 0) verify<double>(s, c1, c2, separate);
    if (testing::Test::HasFailure()) return;
  }
}

template <class T>
struct Rules : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Rules, types);

/// Every rule there is.
choice everything() {
  choice c;
  c.cap = c.slopes = c.bias = c.visible = c.blocks = c.predicate = c.sinks = true, c.hidden = 0.2, c.query_block = 5;
  return c;
}
/// Rules that hide and change nothing else, one at a time, and all rules together.
std::vector<choice> choices() {
  std::vector<choice> all(7, everything());
  for (std::size_t i = 0; i < 6; ++i) all[i] = choice(), all[i].query_block = 5;
  all[0].visible = all[1].blocks = all[2].predicate = all[3].predicate = all[4].bias = all[5].cap = true;
  all[3].tiles = false;
  return all;
}

test::spec spec_of(index_t batch, index_t q_len, index_t kv_len, index_t heads = 2) {
  test::spec s;
  s.batch = batch, s.q_len = q_len, s.kv_len = kv_len, s.heads = heads, s.kv = heads / 2, s.d = 5, s.width = 6;
  return s;
}

/// A call's part: batch entries [b, b + entries), queries [query, query + queries).
template <class T>
forward_args<T> part_of(forward_args<T> a, index_t b, index_t entries, index_t query, index_t queries) {
  const auto cut = [&](auto& x, index_t token, index_t tokens) {
    x.data += b * x.batch_stride + token * x.token_stride, x.batch = entries, x.tokens = tokens;
  };
  const index_t offset = a.mask.query_offset(a.q.tokens, a.k.tokens);
  for (auto* lse : {&a.lse1, &a.lse2}) lse->data += b * lse->batch_stride + query * lse->token_stride;
  cut(a.q, query, queries), cut(a.out, query, queries), cut(a.out1, query, queries), cut(a.out2, query, queries);
  cut(a.k, 0, a.k.tokens), cut(a.v, 0, a.v.tokens);
  a.mask.offset = offset + query;
  return a;
}

/// Deals tasks to workers in an order of its own.
class backward_executor : public test::any_executor {
 public:
  explicit backward_executor(index_t workers) : workers_(workers) {}
  index_t workers() const noexcept override { return workers_; }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    for (index_t task = tasks; task-- > 0;) f(context, task, task % workers_);
  }

 private:
  index_t workers_;
};

TYPED_TEST(Rules, ResultsDependOnNothingElse) {
  using T = TypeParam;
  for (const choice& c : choices())
    // Many queries; a window; several parts, which workers share.
    for (const int shape : {0, 1, 2}) {
      SCOPED_TRACE(c.text());
      test::spec s = shape == 2 ? spec_of(2, 10, 2200) : spec_of(2, 70, 300);
      s.causal = true;
      if (shape == 1) s.window = 90;
      test::random_source random(11);
      test::problem<T> p(s);
      const rule_set<T> first(c, s, random), second(c, s, random);
      const logit_rules<T> rules_2 = second.rules();
      p.args().logits = first.rules(), p.args().logits_2 = &rules_2;
      for (const schedule_choice schedule : test::both_schedules) {
        SCOPED_TRACE(test::name(schedule));
        p.args().schedule = schedule;
        ASSERT_EQ(test::run(p.args()), status::ok);
        const auto whole = p.outputs();
        for (const index_t workers : {2, 3, 7}) {
          SCOPED_TRACE(std::to_string(workers) + " workers");
          backward_executor executor(workers);
          std::vector<unsigned char> memory(test::workspace_bytes(p.args(), workers));
          ASSERT_EQ(test::run(p.args(), {memory.data(), memory.size()}, executor), status::ok);
          p.expect_identical(p.outputs(), whole);
        }
        test::for_each_way(p.args(), [&](const forward_args<T>& way) {
          if (way.schedule != schedule) return;
          ASSERT_EQ(test::run(way), status::ok);
          p.expect_identical(p.outputs(), whole);
        });
        // Each entry by itself, its queries in calls of `step`.
        for (const index_t step : {s.q_len, s.q_len / 2, index_t{5}}) {
          SCOPED_TRACE("calls of " + std::to_string(step) + " queries");
          for (index_t b = 0; b < s.batch; ++b)
            for (index_t query = 0; query < s.q_len; query += step) {
              forward_args<T> a = part_of(p.args(), b, 1, query, step);
              const logit_rules<T> part_2 = second.from(b, query);
              a.logits = first.from(b, query), a.logits_2 = &part_2;
              ASSERT_EQ(test::run(a), status::ok);
            }
          p.expect_identical(p.outputs(), whole);
        }
        if (testing::Test::HasFailure()) return;
      }
    }
}

/// Standard attention on the first query, key and value head, by the rules of the first map.
template <class T>
diffattn::attention_args<T> first_head(const forward_args<T>& a) {
  diffattn::attention_args<T> one;
  one.q = a.q, one.k = a.k, one.v = a.v, one.out = a.out, one.mask = a.mask, one.logits = a.logits, one.lse = a.lse1;
  one.q.heads = one.k.heads = one.v.heads = one.out.heads = 1, one.schedule = a.schedule;
  return one;
}

// λ = 0 leaves standard attention with the rules of the first map; equal maps with λ = 1 leave nothing.
TYPED_TEST(Rules, ZeroLambdaAndEqualMaps) {
  using T = TypeParam;
  for (const choice& c : choices())
    for (const index_t q_len : {3, 70}) {
      SCOPED_TRACE(c.text());
      test::spec s = spec_of(1, q_len, 300, 1);
      s.kv = 1, s.lambda_value = 0;
      test::random_source random(12);
      test::problem<T> p(s);
      const rule_set<T> first(c, s, random), second(c, s, random);
      const logit_rules<T> rules_2 = second.rules();
      for (const schedule_choice schedule : test::both_schedules) {
        SCOPED_TRACE(test::name(schedule));
        forward_args<T>& a = p.args();
        a.lambda = T(0), a.schedule = schedule, a.logits = first.rules(), a.logits_2 = &rules_2;
        ASSERT_EQ(test::run(a), status::ok);
        const std::vector<T> differential = p.out.values(), lse = p.lse1.values();
        ASSERT_EQ(test::run(first_head(a)), status::ok);
        EXPECT_TRUE(test::identical(p.out.values(), differential));
        EXPECT_TRUE(test::identical(p.lse1.values(), lse));

        a.lambda = T(1), a.logits_2 = nullptr;
        const auto copy = [](const test::tensor<T>& x) {
          for (index_t t = 0; t < x.view().tokens; ++t)
            for (index_t e = 0; e < x.view().width; ++e) x.at(0, t, 1, e) = x.at(0, t, 0, e);
        };
        copy(p.q), copy(p.k);
        for (const auto kind : {diffattn::norm_kind::none, diffattn::norm_kind::rms}) {
          a.norm.kind = kind;
          ASSERT_EQ(test::run(a), status::ok);
          for (const T x : p.out.values()) ASSERT_EQ(x, T(0));
        }
        a.norm.kind = diffattn::norm_kind::none;
      }
    }
}

/// Which keys `poisoned` says are poisoned in one tensor: a number that would change everything, or NaN and infinity.
template <class T, class F>
void write_keys(const test::tensor<T>& x, index_t head, bool with_nan, F&& poisoned) {
  const T bad[] = {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(),
                   -std::numeric_limits<T>::infinity()};
  for (index_t b = 0; b < x.view().batch; ++b)
    for (index_t j = 0; j < x.view().tokens; ++j)
      for (index_t c = 0; c < x.view().width && poisoned(j); ++c) x.at(b, j, head, c) = with_nan ? bad[(j + c) % 3] : T(30);
}

enum class restriction { key_ranges, causal, window, bias, visible, blocks, predicate, predicate_with_tiles };

/// Rules of one map that hide the keys of a list from all queries, or from the queries i for which i + key is no multiple of 3.
template <class T>
class hiding {
 public:
  hiding(restriction how, const test::spec& s, std::vector<bool> hidden, bool from_all)
      : hidden_(std::move(hidden)), from_all_(from_all) {
    const auto fill = [&](auto& to, auto shown, auto not_shown) {
      for (index_t i = 0; i < s.q_len; ++i)
        for (index_t j = 0; j < s.kv_len; ++j) to.push_back(hides(i, j) ? not_shown : shown);
    };
    if (how == restriction::bias) fill(bias_, T(0), -std::numeric_limits<T>::infinity());
    if (how == restriction::visible) fill(visible_, static_cast<unsigned char>(1), static_cast<unsigned char>(0));
    if (!bias_.empty()) rules_.bias = {bias_.data(), 0, 0, s.kv_len, 1};
    if (!visible_.empty()) rules_.visible = {visible_.data(), 0, 0, s.kv_len, 1};
    if (how == restriction::blocks) {
      begins_ = {0};
      for (index_t i = 0; i < s.q_len; ++i) {
        for (index_t j = 0; j < s.kv_len; ++j)
          if (!hides(i, j)) keys_.push_back(j);
        begins_.push_back(static_cast<index_t>(keys_.size()));
      }
      rules_.blocks = {1, 1, begins_.data(), keys_.data(), 0, 0};
    }
    if (how == restriction::predicate || how == restriction::predicate_with_tiles) {
      rules_.predicate.context = this;
      rules_.predicate.sees = [](const void* self, index_t, index_t, index_t i, index_t j) {
        return !static_cast<const hiding*>(self)->hides(i, j);
      };
      if (how == restriction::predicate_with_tiles)
        rules_.predicate.tile = [](const void* self, index_t, index_t, index_t first, index_t last, key_range keys) {
          bool some = false, all = true;
          for (index_t i = first; i <= last; ++i)
            for (index_t j = keys.begin; j < keys.end; ++j)
              (static_cast<const hiding*>(self)->hides(i, j) ? all : some) = !static_cast<const hiding*>(self)->hides(i, j);
          return all ? sight::all : some ? sight::some : sight::none;
        };
    }
  }
  hiding(const hiding&) = delete;
  const logit_rules<T>& rules() const { return rules_; }
  bool hides(index_t i, index_t j) const { return hidden_[static_cast<std::size_t>(j)] && (from_all_ || (i + j) % 3 != 0); }

 private:
  std::vector<bool> hidden_;
  bool from_all_;
  logit_rules<T> rules_;
  std::vector<T> bias_;
  std::vector<unsigned char> visible_;
  std::vector<index_t> begins_, keys_;
};

/// Single keys, whole tiles, chunks and parts, both ends; never key 5.
std::vector<bool> hidden_keys(index_t n) {
  std::vector<bool> hidden(static_cast<std::size_t>(n));
  for (index_t j = 0; j < n; ++j)
    hidden[static_cast<std::size_t>(j)] =
        j % 7 == 3 || j == 0 || j == n - 1 || (j >= 32 && j < 96) || (j >= 120 && j < 270) || (j >= 1020 && j < 2050);
  return hidden;
}

constexpr restriction rule_restrictions[] = {restriction::bias, restriction::visible, restriction::blocks,
                                             restriction::predicate, restriction::predicate_with_tiles};

const test::spec poison_specs[] = {spec_of(1, 3, 70), spec_of(2, 37, 300), spec_of(1, 5, 2200)};

/// f(a call that sees the keys and values of p) by both schedules, from tensors, and from caches of all storages that T has.
template <class T, class F>
void for_each_storage(test::problem<T>& p, F&& f) {
  for (const schedule_choice schedule : test::both_schedules) {
    SCOPED_TRACE(test::name(schedule));
    p.args().schedule = schedule;
    f(p.args());
    std::vector<index_t> sequences(static_cast<std::size_t>(p.args().q.batch));
    std::iota(sequences.begin(), sequences.end(), index_t{0});
    int place = 0;
    for (const test::storage type : test::float_storages) {
      const test::cache_choice& choice = test::all_caches[place++];
      diffattn::kv_cache_config config = p.cache_config(choice);
      config.keys = config.values = std::is_same_v<T, double> ? test::storage::f64 : type;
      config.capacity = p.args().k.tokens;
      SCOPED_TRACE(std::string(test::name(config.keys)) + ", " + choice.text());
      test::owned_cache cache(config);
      cache.append_in_turns(sequences, p.k.view(), p.v.view());
      f(p.cached(cache, sequences));
      if constexpr (std::is_same_v<T, double>) break;
    }
  }
}

TYPED_TEST(Rules, HiddenKeysAndValuesAreNotRead) {
  using T = TypeParam;
  for (const test::spec& plain : poison_specs)
    for (const restriction how :
         {restriction::key_ranges, restriction::causal, restriction::window, restriction::bias, restriction::visible,
          restriction::blocks, restriction::predicate, restriction::predicate_with_tiles}) {
      SCOPED_TRACE("restriction " + std::to_string(static_cast<int>(how)) + ", " + plain.text());
      test::spec s = plain;
      std::vector<bool> hidden = hidden_keys(s.kv_len);
      s.causal = how == restriction::causal || how == restriction::window;
      const index_t last = s.kv_len / 2;  // that a query sees
      if (s.causal) s.offset = last - s.q_len + 1;
      if (how == restriction::window) s.window = 20;
      test::problem<T> p(s);
      const std::vector<key_range> ranges(static_cast<std::size_t>(s.batch), {last / 2 + 1, last + 1});
      if (how == restriction::key_ranges) p.args().mask.key_ranges = ranges.data();
      if (how <= restriction::window)
        for (index_t j = 0; j < s.kv_len; ++j) {
          const index_t first = how == restriction::key_ranges ? last / 2 + 1 : how == restriction::causal ? 0 : s.offset - 19;
          hidden[static_cast<std::size_t>(j)] = j < first || j > last;
        }
      const hiding<T> rules(how, s, hidden, true);
      p.args().logits = rules.rules();
      const auto is_hidden = [&](index_t j) { return bool(hidden[static_cast<std::size_t>(j)]); };
      std::vector<typename test::problem<T>::results> clean;
      std::vector<T> clean_attention[2];
      for (const bool with_nan : {false, true}) {
        for (index_t h = 0; h < p.k.view().heads; ++h) write_keys(p.k, h, with_nan, is_hidden);
        for (index_t h = 0; h < p.v.view().heads; ++h) write_keys(p.v, h, with_nan, is_hidden);
        std::size_t turn = 0;
        for_each_storage(p, [&](const forward_args<T>& way) {
          const status st = test::run(way);
          ASSERT_EQ(st, status::ok) << message(st);
          if (with_nan)
            p.expect_identical(p.outputs(), clean[turn]);
          else
            clean.push_back(p.outputs());
          for (const T x : p.out.values()) ASSERT_TRUE(std::isfinite(x));
          ++turn;
        });
        for (const schedule_choice schedule : test::both_schedules) {
          p.args().schedule = schedule;
          std::vector<T>& expected = clean_attention[static_cast<std::size_t>(schedule) % 2];
          ASSERT_EQ(test::run(first_head(p.args())), status::ok);
          if (with_nan) {
            EXPECT_TRUE(test::identical(p.out.values(), expected)) << test::name(schedule);
          }
          expected = p.out.values();
        }
      }
      if (testing::Test::HasFailure()) return;
    }
}

// What one map hides the other may see: its keys are not read for the first map, but a value is live.
TYPED_TEST(Rules, HiddenInOneMapOnly) {
  using T = TypeParam;
  for (const test::spec& s : poison_specs)
    for (const restriction how : rule_restrictions)
      for (const int hiding_map : {0, 1}) {
        SCOPED_TRACE("restriction " + std::to_string(static_cast<int>(how)) + " of map " + std::to_string(hiding_map + 1) +
                     ", " + s.text());
        const std::vector<bool> hidden = hidden_keys(s.kv_len);
        const auto is_hidden = [&](index_t j) { return bool(hidden[static_cast<std::size_t>(j)]); };
        const hiding<T> rules(how, s, hidden, true);
        const logit_rules<T> none;
        // Interleaved heads: key heads 0, 2, … belong to the first map.
        const auto poison_map = [&](test::problem<T>& p, int map, bool with_nan) {
          for (index_t h = map; h < p.k.view().heads; h += 2) write_keys(p.k, h, with_nan, is_hidden);
        };
        const auto set = [&](test::problem<T>& p) {
          p.args().logits = hiding_map == 0 ? rules.rules() : none,
          p.args().logits_2 = hiding_map == 0 ? &none : &rules.rules();
        };
        test::problem<T> p(s), live_key(s), live_value(s);
        set(p), set(live_key), set(live_value);
        for (const schedule_choice schedule : test::both_schedules) {
          SCOPED_TRACE(test::name(schedule));
          p.args().schedule = live_key.args().schedule = live_value.args().schedule = schedule;
          poison_map(p, hiding_map, false);
          ASSERT_EQ(test::run(p.args()), status::ok);
          const auto clean = p.outputs();
          poison_map(p, hiding_map, true);
          ASSERT_EQ(test::run(p.args()), status::ok);
          p.expect_identical(p.outputs(), clean);

          poison_map(live_key, 1 - hiding_map, true);
          ASSERT_EQ(test::run(live_key.args()), status::ok);
          for (const T x : live_key.out.values()) ASSERT_TRUE(std::isnan(x));
          const auto all_finite = [](const std::vector<T>& v) {
            return std::all_of(v.begin(), v.end(), [](T x) { return std::isfinite(x); });
          };
          const auto all_nan = [](const std::vector<T>& v) {
            return std::all_of(v.begin(), v.end(), [](T x) { return std::isnan(x); });
          };
          const auto keys = live_key.outputs();
          EXPECT_TRUE(all_finite(keys.raw[hiding_map]) && all_finite(keys.lse[hiding_map]));
          EXPECT_TRUE(all_nan(keys.raw[1 - hiding_map]) && all_nan(keys.lse[1 - hiding_map]));

          for (index_t h = 0; h < live_value.v.view().heads; ++h) write_keys(live_value.v, h, true, is_hidden);
          ASSERT_EQ(test::run(live_value.args()), status::ok);
          const auto values = live_value.outputs();
          EXPECT_TRUE(all_nan(values.out) && all_nan(values.raw[1 - hiding_map]));
          EXPECT_TRUE(all_finite(values.raw[hiding_map]) && all_finite(values.lse[0]) && all_finite(values.lse[1]));
        }
        if (testing::Test::HasFailure()) return;
      }
}

// One value is NaN in one channel: it reaches that channel of the rows that see it, and of no other row or head.
TYPED_TEST(Rules, LiveNanReachesItsRows) {
  using T = TypeParam;
  for (const test::spec& plain : poison_specs)
    for (const restriction how : rule_restrictions) {
      SCOPED_TRACE("restriction " + std::to_string(static_cast<int>(how)) + ", " + plain.text());
      test::spec s = plain;
      s.heads = 4, s.kv = 2;
      const hiding<T> rules(how, s, hidden_keys(s.kv_len), false);
      test::problem<T> clean(s), value(s), query(s);
      for (auto* p : {&clean, &value, &query}) p->args().logits = rules.rules();
      const index_t poisoned = 38;  // hidden from two thirds of the queries
      value.v.at(0, poisoned, 1, 2) = std::numeric_limits<T>::quiet_NaN();
      query.q.at(0, 1, 5, 0) = std::numeric_limits<T>::quiet_NaN();  // row 1, head 2, map 2
      for (const schedule_choice schedule : test::both_schedules) {
        SCOPED_TRACE(test::name(schedule));
        for (auto* p : {&clean, &value, &query}) {
          p->args().schedule = schedule;
          ASSERT_EQ(test::run(p->args()), status::ok);
        }
        for (index_t b = 0; b < s.batch; ++b)
          for (index_t i = 0; i < s.q_len; ++i)
            for (index_t h = 0; h < 4; ++h)
              for (index_t c = 0; c < s.width; ++c) {
                const T expected = clean.out.at(b, i, h, c), x = value.out.at(b, i, h, c), y = query.out.at(b, i, h, c);
                const bool sees = b == 0 && h / 2 == 1 && c == 2 && !rules.hides(i, poisoned);
                const bool asks = b == 0 && h == 2 && i == 1;
                ASSERT_EQ(std::isnan(x), sees) << "row " << i << ", head " << h << ", channel " << c;
                ASSERT_TRUE(sees || x == expected) << "row " << i << ", head " << h << ", channel " << c;
                ASSERT_EQ(std::isnan(y), asks) << "row " << i << ", head " << h;
                ASSERT_TRUE(asks || y == expected) << "row " << i << ", head " << h;
              }
      }
    }
}

// Arrays in any order of memory, forwards and backwards, are the same numbers.
TYPED_TEST(Rules, AnyStrides) {
  using T = TypeParam;
  const test::spec s = spec_of(2, 37, 150);
  test::random_source random(13);
  const index_t sizes[] = {s.batch, s.heads, s.q_len, s.kv_len};
  for (int sample = 0; sample < 24; ++sample) {
    // Axes from the innermost on; some broadcast, some run backwards.
    index_t order[] = {0, 1, 2, 3}, strides[4], span = 1, start = 0;
    for (std::size_t i = 3; i > 0; --i)
      std::swap(order[i], order[static_cast<std::size_t>(random.integer(0, static_cast<index_t>(i)))]);
    for (const index_t axis : order) {
      const index_t kind = random.integer(0, 3), size = sizes[axis];
      strides[axis] = kind == 0 ? 0 : kind == 1 ? -span : span;
      if (kind == 1) start += (size - 1) * span;
      if (kind != 0) span *= size;
    }
    std::vector<T> bias = test::normal_vector<T>(span, random);
    std::vector<unsigned char> visible;
    for (T& x : bias) {
      if (random.integer(0, 5) == 0) x = -std::numeric_limits<T>::infinity();
      visible.push_back(static_cast<unsigned char>(random.integer(0, 3)));
    }
    test::problem<T> p(s);
    logit_rules<T>& rules = p.args().logits;
    std::vector<T> dense_bias;
    std::vector<unsigned char> dense_visible;
    const diffattn::logit_view<T> any{bias.data() + start, strides[0], strides[1], strides[2], strides[3]};
    const diffattn::logit_view<unsigned char> seen{visible.data() + start, strides[0], strides[1], strides[2], strides[3]};
    for (index_t b = 0; b < s.batch; ++b)
      for (index_t h = 0; h < s.heads; ++h)
        for (index_t i = 0; i < s.q_len; ++i)
          for (index_t j = 0; j < s.kv_len; ++j)
            dense_bias.push_back(*any.at(b, h, i, j)), dense_visible.push_back(*seen.at(b, h, i, j));
    const index_t row = s.kv_len, head = s.q_len * row, entry = s.heads * head;
    for (const schedule_choice schedule : test::both_schedules) {
      p.args().schedule = schedule;
      rules.bias = any, rules.visible = seen;
      ASSERT_EQ(test::run(p.args()), status::ok);
      const auto results = p.outputs();
      rules.bias = {dense_bias.data(), entry, head, row, 1}, rules.visible = {dense_visible.data(), entry, head, row, 1};
      ASSERT_EQ(test::run(p.args()), status::ok);
      p.expect_identical(p.outputs(), results);
      // An array of bool is an array of bytes that are 0 or 1.
      const auto flags = std::make_unique<bool[]>(dense_visible.size());
      for (std::size_t e = 0; e < dense_visible.size(); ++e) flags[e] = dense_visible[e] != 0;
      rules.visible.data = reinterpret_cast<const unsigned char*>(flags.get());
      ASSERT_EQ(test::run(p.args()), status::ok);
      p.expect_identical(p.outputs(), results);
    }
  }
}

// The least finite number as a bias is a number: beside ordinary ones it weighs nothing, and among its like all weigh the same.
TYPED_TEST(Rules, FiniteMinimum) {
  using T = TypeParam;
  using limits = std::numeric_limits<T>;
  for (const test::spec& plain : poison_specs)
    for (const double amplitude : {1.0, 100.0})
      for (const schedule_choice schedule : test::both_schedules) {
        SCOPED_TRACE(plain.text() + ", " + test::name(schedule));
        test::spec s = plain;
        s.q_amplitude = amplitude;
        test::problem<T> p(s);
        p.args().schedule = schedule;
        std::vector<T> bias(static_cast<std::size_t>(s.kv_len));
        p.args().logits.bias = {bias.data(), 0, 0, 0, 1};
        test::random_source random(14);
        // The first tile, the first part, all but key 40, any keys; the rest is ordinary.
        for (int which = 0; which < 4; ++which) {
          std::vector<bool> least(bias.size());
          for (std::size_t j = 0; j < bias.size(); ++j)
            least[j] = which == 0 ? j < 32 : which == 1 ? j < 1024 && j != 69 : which == 2 ? j != 40 : random.coin();
          least[40] = least[40] && which == 0;
          typename test::problem<T>::results with[2];
          for (const bool hidden : {false, true}) {
            for (std::size_t j = 0; j < bias.size(); ++j)
              bias[j] = !least[j] ? static_cast<T>(0.01 * double(j % 10)) : hidden ? -limits::infinity() : limits::lowest();
            ASSERT_EQ(test::run(p.args()), status::ok);
            with[hidden] = p.outputs();
          }
          p.expect_identical(with[0], with[1]);
          if (which == 2) {
            std::size_t e = 0;
            for (index_t b = 0; b < s.batch; ++b)
              for (index_t i = 0; i < s.q_len; ++i)
                for (index_t h = 0; h < s.heads; ++h)
                  for (index_t c = 0; c < s.width; ++c)
                    ASSERT_NEAR(with[0].raw[0][e++], p.v.at(b, 40, h * s.kv / s.heads, c), 8 * test::epsilon<T>());
          }
        }
        for (const T extreme : {limits::lowest(), limits::max()}) {  // all keys weigh the same
          std::fill(bias.begin(), bias.end(), extreme);
          ASSERT_EQ(test::run(p.args()), status::ok);
          std::size_t e = 0;
          const auto results = p.outputs();
          for (index_t b = 0; b < s.batch; ++b)
            for (index_t i = 0; i < s.q_len; ++i)
              for (index_t h = 0; h < s.heads; ++h)
                for (index_t c = 0; c < s.width; ++c, ++e) {
                  double mean = 0;
                  for (index_t j = 0; j < s.kv_len; ++j) mean += double(p.v.at(b, j, h * s.kv / s.heads, c)) / double(s.kv_len);
                  ASSERT_NEAR(double(results.raw[0][e]), mean, 64 * test::epsilon<T>()) << e;
                  ASSERT_NEAR(double(results.raw[1][e]), mean, 64 * test::epsilon<T>()) << e;
                }
        }
        std::fill(bias.begin(), bias.end(), T(0)), bias[40] = limits::max();  // one key weighs everything
        ASSERT_EQ(test::run(p.args()), status::ok);
        EXPECT_EQ(p.outputs().raw[0][0], p.v.at(0, 40, 0, 0));
      }
}

// Infinite and NaN biases are not repaired.
TYPED_TEST(Rules, BiasThatIsNoNumber) {
  using T = TypeParam;
  const test::spec s = spec_of(1, 40, 70);
  for (const T bad : {std::numeric_limits<T>::infinity(), std::numeric_limits<T>::quiet_NaN()})
    for (const index_t key : {0, 33, 69})
      for (const schedule_choice schedule : test::both_schedules) {
        test::problem<T> p(s);
        std::vector<T> bias(static_cast<std::size_t>(s.q_len * s.kv_len));
        bias[static_cast<std::size_t>(7 * s.kv_len + key)] = bad;
        p.args().logits.bias = {bias.data(), 0, 0, s.kv_len, 1}, p.args().schedule = schedule;
        ASSERT_EQ(test::run(p.args()), status::ok);
        for (index_t i = 0; i < s.q_len; ++i)
          for (index_t h = 0; h < s.heads; ++h) ASSERT_EQ(std::isnan(p.out.at(0, i, h, 3)), i == 7) << "row " << i;
      }
}

TYPED_TEST(Rules, SoftCapsOfAllSizes) {
  using T = TypeParam;
  using limits = std::numeric_limits<T>;
  // Down to here a cap is a number like any other; far above all logits it changes nothing.
  for (const double cap : {1e-3, 1.0, 50.0, 2e4, 1e30})
    for (const double amplitude : {0.01, 1.0, 100.0}) {
      test::spec s = spec_of(1, 37, 150);
      s.q_amplitude = amplitude;
      test::problem<T> p(s);
      p.args().logits.soft_cap = static_cast<T>(cap);
      reference::problem<T> r = p.for_reference();
      r.cap[0] = r.cap[1] = double(p.args().logits.soft_cap);
      p.verify(reference::attention(r));
    }
  // A cap of next to nothing makes all logits next to nothing, 0 among them.
  for (const T cap : {limits::denorm_min(), limits::min(), T(1e-30)}) {
    const test::spec s = spec_of(1, 37, 150);
    test::problem<T> p(s), flat(s);
    for (index_t c = 0; c < s.d; ++c) p.k.at(0, 3, 0, c) = 0, p.q.at(0, 2, 1, c) = 0;
    flat.q.for_each([](T& x) { x = 0; });
    p.args().logits.soft_cap = cap;
    for (const schedule_choice schedule : test::both_schedules) {
      p.args().schedule = flat.args().schedule = schedule;
      ASSERT_EQ(test::run(p.args()), status::ok);
      ASSERT_EQ(test::run(flat.args()), status::ok);
      p.expect_identical(p.outputs(), flat.outputs());
    }
  }
}

TYPED_TEST(Rules, SlopesAreABias) {
  using T = TypeParam;
  for (const index_t kv_len : {40, 150, 1500})
    for (const bool causal : {false, true})
      for (const index_t offset : {diffattn::attention_mask::align_to_end, index_t{20}}) {
        test::spec s = spec_of(1, 37, kv_len);
        s.causal = causal, s.offset = offset;
        const std::vector<T> slopes = {T(0.5), T(0.0078125)};
        test::problem<T> p(s), biased(s);
        const index_t own = offset == 20 ? 20 : kv_len - s.q_len;
        std::vector<T> bias;
        for (const T slope : slopes)
          for (index_t i = 0; i < s.q_len; ++i)
            for (index_t j = 0; j < kv_len; ++j) bias.push_back(-slope * static_cast<T>(std::labs(i + own - j)));
        p.args().logits.slopes = slopes.data();
        biased.args().logits.bias = {bias.data(), 0, s.q_len * kv_len, kv_len, 1};
        reference::problem<T> r = p.for_reference();
        r.added = [&](int, long, long h, long i, long j) {
          return double(bias[static_cast<std::size_t>((h * s.q_len + i) * kv_len + j)]);
        };
        const reference::result expected = reference::attention(r);
        p.verify(expected), biased.verify(expected);
      }
}

TYPED_TEST(Rules, Sinks) {
  using T = TypeParam;
  using limits = std::numeric_limits<T>;
  for (const index_t kv_len : {1, 70, 1100})
    for (const schedule_choice schedule : test::both_schedules) {
      test::spec s = spec_of(1, 37, kv_len);
      test::problem<T> p(s);
      p.args().schedule = schedule;
      ASSERT_EQ(test::run(p.args()), status::ok);
      const auto plain = p.outputs();
      T sinks[2];
      p.args().logits.sinks = sinks;
      // Beside ordinary sinks, by the reference.
      for (const double sink : {-3.0, 0.0, 5.0, 40.0}) {
        sinks[0] = static_cast<T>(sink), sinks[1] = -limits::infinity();
        reference::problem<T> r = p.for_reference();
        r.sink[0] = r.sink[1] = {sink, -std::numeric_limits<double>::infinity()};
        ASSERT_EQ(test::run(p.args()), status::ok);
        p.expect_near(p.outputs(), reference::attention(r));
      }
      for (const T none : {-limits::infinity(), limits::lowest(), T(-1e30), T(-5e4)}) {
        sinks[0] = sinks[1] = none;
        ASSERT_EQ(test::run(p.args()), status::ok);
        p.expect_identical(p.outputs(), plain);
      }
      for (const T large : {T(1e4), T(1e30), limits::max()}) {  // takes all weight but 2^-100 at most
        sinks[0] = large, sinks[1] = -limits::infinity();
        ASSERT_EQ(test::run(p.args()), status::ok);
        const auto results = p.outputs();
        for (index_t i = 0; i < s.q_len; ++i) {
          for (index_t c = 0; c < s.width; ++c) ASSERT_LE(std::fabs(p.out.at(0, i, 0, c)), T(1e-28));
          // Above max / log2 e it counts as that.
          const double most = double(limits::max()) / 1.4426950408889634;
          ASSERT_NEAR(double(p.lse1.at(0, i, 0, 0)) / std::min(double(large), most), 1, 4 * test::epsilon<T>());
          ASSERT_EQ(p.out.at(0, i, 1, 0), plain.out[static_cast<std::size_t>((i * 2 + 1) * s.width)]);
        }
      }
      sinks[0] = limits::quiet_NaN();  // reaches its head
      ASSERT_EQ(test::run(p.args()), status::ok);
      for (index_t i = 0; i < s.q_len; ++i) {
        ASSERT_TRUE(std::isnan(p.out.at(0, i, 0, 0)) && std::isnan(p.lse1.at(0, i, 0, 0)));
        ASSERT_EQ(p.out.at(0, i, 1, 0), plain.out[static_cast<std::size_t>((i * 2 + 1) * s.width)]);
      }
      // A sink does not hide that a logit is NaN.
      sinks[0] = sinks[1] = T(1e4);
      const T before = p.q.at(0, 3, 0, 0);
      p.q.at(0, 3, 0, 0) = limits::quiet_NaN();
      ASSERT_EQ(test::run(p.args()), status::ok);
      EXPECT_TRUE(std::isnan(p.out.at(0, 3, 0, 0)) && std::isnan(p.lse1.at(0, 3, 0, 0)));
      p.q.at(0, 3, 0, 0) = before;
      // Beside no key at all a sink is the whole sum, and has no value.
      const key_range empty{0, 0};
      const unsigned char no = 0;
      for (const bool by_rule : {false, true}) {
        p.args().mask.key_ranges = by_rule ? nullptr : &empty;
        p.args().logits.visible =
            by_rule ? diffattn::logit_view<unsigned char>{&no, 0, 0, 0, 0} : diffattn::logit_view<unsigned char>{};
        sinks[0] = T(2.5), sinks[1] = -limits::infinity();
        ASSERT_EQ(test::run(p.args()), status::ok);
        for (const T x : p.out.values()) ASSERT_EQ(x, T(0));
        for (index_t i = 0; i < s.q_len; ++i) {
          ASSERT_NEAR(double(p.lse1.at(0, i, 0, 0)), 2.5, 4 * test::epsilon<T>());
          ASSERT_EQ(p.lse2.at(0, i, 1, 0), -limits::infinity());
        }
        sinks[0] = limits::lowest();
        ASSERT_EQ(test::run(p.args()), status::ok);
        ASSERT_TRUE(std::isfinite(p.lse1.at(0, 0, 0, 0)));
      }
    }
}

/// Hides keys 1024 … 1087 by tiles alone.
struct whole_tiles {
  std::atomic<int> asked{0};

  static bool sees(const void* self, index_t, index_t, index_t, index_t) {
    const_cast<whole_tiles*>(static_cast<const whole_tiles*>(self))->asked++;
    return true;
  }
  static sight tile(const void*, index_t, index_t, index_t, index_t, key_range keys) {
    if (keys.end <= 1024 || keys.begin >= 1088) return sight::all;
    return keys.begin >= 1024 && keys.end <= 1088 ? sight::none : sight::some;
  }
};

// Where tiles say all or nothing, single keys are not asked: also beside other rules, and where a value is infinite.
TYPED_TEST(Rules, SingleKeysAreAskedOnlyInTilesThatShowSome) {
  using T = TypeParam;
  for (const index_t q_len : {4, 37})
    for (const bool with_visible : {false, true})
      for (const bool with_infinity : {false, true}) {
        test::problem<T> p(spec_of(1, q_len, 1200));
        forward_args<T>& a = p.args();
        if (with_infinity)
          for (index_t h = 0; h < p.v.view().heads; ++h) p.v.at(0, 1030, h, 0) = std::numeric_limits<T>::infinity();
        std::vector<unsigned char> all(1200, 1), tiles = all;
        std::fill(tiles.begin() + 1024, tiles.begin() + 1088, static_cast<unsigned char>(0));
        if (with_visible) all[300] = tiles[300] = 0;
        const whole_tiles predicate;
        for (const schedule_choice schedule : test::both_schedules) {
          a.schedule = schedule, a.logits = {}, a.logits.visible = {tiles.data(), 0, 0, 0, 1};
          ASSERT_EQ(test::run(a), status::ok);
          const auto expected = p.outputs();
          a.logits = {}, a.logits.predicate = {&predicate, whole_tiles::sees, whole_tiles::tile};
          if (with_visible) a.logits.visible = {all.data(), 0, 0, 0, 1};
          std::vector<unsigned char> memory(test::workspace_bytes(a), 0xff);
          backward_executor serial(1);
          ASSERT_EQ(test::run(a, {memory.data(), memory.size()}, serial), status::ok);
          p.expect_identical(p.outputs(), expected);
          EXPECT_EQ(predicate.asked, 0) << test::name(schedule);
        }
      }
}

// However far a query is from its keys, where a float does not hold the distance: what its neighbours see changes nothing.
TYPED_TEST(Rules, FarSlopesDoNotKnowTheirNeighbours) {
  using T = TypeParam;
  test::spec s = spec_of(1, 40, 90);
  s.causal = true;
  const std::vector<T> slopes = {T(1e-7), T(3e-8)};
  for (const index_t offset : {index_t{40}, index_t{33554433}}) {
    test::problem<T> p(s);
    p.args().mask.offset = offset, p.args().mask.window = offset - 7;  // each row begins one key behind the one before
    p.args().logits.slopes = slopes.data();
    for (const schedule_choice schedule : test::both_schedules) {
      p.args().schedule = schedule;
      ASSERT_EQ(test::run(p.args()), status::ok);
      const auto whole = p.outputs();
      for (index_t i = 0; i < s.q_len; ++i) ASSERT_EQ(test::run(part_of(p.args(), 0, 1, i, 1)), status::ok);
      p.expect_identical(p.outputs(), whole);
    }
  }
}

}  // namespace
