// SPDX-License-Identifier: MIT
// Laws that hold for any call. RapidCheck searches for a call that breaks one, and for the plainest such call.
//
//   RC_PARAMS="seed=123 max_success=100000"    begins elsewhere, searches longer
//   RC_PARAMS="reproduce=..."                  repeats a failure, as it says

#define EIGEN_USE_THREADS

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstdlib>
#include <diffattn/executor/eigen_thread_pool.hpp>
#include <diffattn/merge.hpp>
#include <functional>
#include <numeric>

#include "support/any_call.hpp"
#include "support/calls.hpp"

namespace {

using diffattn::index_t;
using diffattn::schedule_choice;
using test::any_call;
using test::call_from_cache;
using test::choices;
using test::expect;
using test::expectation;
using test::forward_args;
using test::logit_rules;
using test::owned_arrays;
using test::pieces_of;
using test::results;
using test::results_of;
using test::rules_of;
using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

constexpr double infinity = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------- searching

/// What RC_PARAMS does not say otherwise.
const int defaults = setenv("RC_PARAMS", "seed=1 max_success=1000", 0);

using law = std::function<AssertionResult(choices&)>;

/// Tries the law on random choices. Of those that break it, RapidCheck shows the fewest and smallest bytes: the plainest call.
void holds(const law& f) {
  const auto bytes = *rc::gen::resize(200, rc::gen::arbitrary<std::vector<std::uint8_t>>());
  choices c(bytes);
  const AssertionResult r = f(c);
  if (!r) RC_FAIL(r.message());
}

// ---------------------------------------------------------------------------------------------- running

/// The outputs of a call. Throws if it is refused.
template <class T>
results run(const forward_args<T>& a) {
  diffattn::throw_if_error(test::run(a));
  return results_of(a);
}
template <class T>
results run(const forward_args<T>& a, test::any_executor& executor) {
  const diffattn::owned_workspace scratch(test::workspace_bytes(a, executor.workers()));
  diffattn::throw_if_error(test::run(a, scratch.view(), executor));
  return results_of(a);
}

/// A law for calls of every type: f(call, choices).
template <class F>
law of_any_call(F f) {
  return [f](choices& c) {
    return test::with_any_type(c, [&](auto element) {
      any_call<decltype(element)> call(c, 100'000);
      AssertionResult r = AssertionSuccess();
      try {
        r = f(call, c);
      } catch (const std::invalid_argument& refused) {
        r = AssertionFailure() << refused.what();
      }
      return r ? r : r << "\n" << call.text();
    });
  };
}

/// All optional outputs, in new memory.
template <class T, class R = diffattn::compute_type<T>>
void ask_for_all(owned_arrays& memory, forward_args<T>& a) {
  choices plain(nullptr, 0);
  const auto& o = a.out;
  for (auto* raw : {&a.out1, &a.out2}) *raw = test::place_tensor<R>(plain, memory, o.batch, o.tokens, o.heads, o.width, R(-77));
  for (auto* lse : {&a.lse1, &a.lse2}) *lse = test::place_rows<R>(plain, memory, o.batch, o.tokens, o.heads, R(-77));
}

// ---------------------------------------------------------------------------------------------- parts of calls

/// A predicate on other heads, queries and entries.
struct moved_predicate {
  diffattn::mask_predicate from;
  index_t b = 0, query = 0;
  std::vector<index_t> heads;  ///< the head there for each here; empty: the same

  index_t head(index_t h) const { return heads.empty() ? h : heads[static_cast<std::size_t>(h)]; }
  static bool sees(const void* self, index_t b, index_t h, index_t i, index_t j) {
    const moved_predicate& m = *static_cast<const moved_predicate*>(self);
    return m.from.sees(m.from.context, b + m.b, m.head(h), i + m.query, j);
  }
  static diffattn::sight tile(const void* self, index_t b, index_t h, index_t first, index_t last, diffattn::key_range keys) {
    const moved_predicate& m = *static_cast<const moved_predicate*>(self);
    return m.from.tile(m.from.context, b + m.b, m.head(h), first + m.query, last + m.query, keys);
  }
};

/// `change` applied to the rules of both maps, in memory of their own.
template <class T, class F>
void change_rules(owned_arrays& memory, forward_args<T>& a, F&& change) {
  if (a.logits_2) {
    auto* const second = memory.keep_one(*a.logits_2);
    change(*second);
    a.logits_2 = second;
  }
  change(a.logits);
}

template <class R>
void move_predicate(owned_arrays& memory, logit_rules<R>& r, moved_predicate m) {
  if (!r.predicate.sees) return;
  m.from = r.predicate;
  r.predicate = {memory.keep_one(std::move(m)), moved_predicate::sees, m.from.tile ? moved_predicate::tile : nullptr};
}

/// Queries [first, first + count) of batch entries [entry, entry + entries), as a call of its own.
template <class T>
forward_args<T> part_of(any_call<T>& call, index_t entry, index_t entries, index_t first, index_t count) {
  using R = typename any_call<T>::R;
  forward_args<T> a = call.args;
  const auto cut = [&](auto t, bool queries) {
    if (t.data) t.data = t.at(entry, queries ? first : 0, 0);
    t.batch = entries;
    if (queries) t.tokens = count;
    return t;
  };
  const auto cut_coefficient = [&](diffattn::lambda_view<R>& x, bool is_gate) {
    auto v = x.array();
    if (!v.data) return;
    v.data = &v.at(entry, first, 0);
    x = diffattn::lambda_view<R>::strided(v, is_gate);
  };
  a.q = cut(a.q, true), a.out = cut(a.out, true), a.k = cut(a.k, false), a.v = cut(a.v, false);
  if (a.out1.data) a.out1 = cut(a.out1, true);
  if (a.out2.data) a.out2 = cut(a.out2, true);
  for (auto* lse : {&a.lse1, &a.lse2})
    if (lse->data) lse->data = &lse->at(entry, first, 0);
  cut_coefficient(a.lambda, call.lambda_is_gate), cut_coefficient(a.alpha, call.alpha_is_gate);
  if (!a.mask.query_starts) {
    a.mask.offset = call.args.mask.query_offset(call.args.q.tokens, a.k.tokens) + first;
    if (a.mask.key_ranges) a.mask.key_ranges += entry;
    if (a.mask.prefixes) a.mask.prefixes += entry;
  } else if (count != call.args.q.tokens) {
    std::vector<std::int32_t> starts(a.mask.query_starts, a.mask.query_starts + a.mask.sequences + 1);
    for (std::int32_t& s : starts) s = static_cast<std::int32_t>(std::min(std::max(index_t{s} - first, index_t{0}), count));
    a.mask.query_starts = call.memory.keep(std::move(starts));
  }
  change_rules(call.memory, a, [&](logit_rules<R>& r) {
    if (r.bias.data) r.bias.data = r.bias.at(entry, 0, first, 0);
    if (r.visible.data) r.visible.data = r.visible.at(entry, 0, first, 0);
    if (r.blocks.begins) r.blocks.begins = r.blocks.row(entry, 0, first);
    move_predicate(call.memory, r, {{}, entry, first, {}});
  });
  return a;
}

/// The same call with everything said key by key: a bias of each map, −∞ where it sees nothing; keys in the order keys[0], …
template <class T>
forward_args<T> explicit_call(any_call<T>& call, const std::vector<index_t>& keys) {
  using R = typename any_call<T>::R;
  const forward_args<T>& from = call.args;
  const index_t batch = from.q.batch, heads = from.heads.heads, q_len = from.q.tokens, n = from.k.tokens;
  choices plain(nullptr, 0);
  std::vector<R> bias[2];
  for (std::vector<R>& of_map : bias)
    of_map.assign(static_cast<std::size_t>(batch * heads * q_len * n), static_cast<R>(-infinity));
  for (const test::sequence_piece& s : pieces_of(from)) {
    test::read_problem<R> p;
    read(from, s, p);
    for (int m = 0; m < 2; ++m)
      for (index_t h = 0; h < heads; ++h)
        for (index_t i = 0; i < s.queries; ++i)
          for (index_t j = 0; j < n; ++j) {
            const index_t key = keys[static_cast<std::size_t>(j)] - s.first_key;
            if (key >= 0 && key < s.keys && p.sees(m, h, i, key))
              bias[m][static_cast<std::size_t>(((s.b * heads + h) * q_len + s.first_query + i) * n + j)] =
                  static_cast<R>(p.problem.added(m, 0, h, i, key));
          }
  }
  forward_args<T> a = from;
  const auto reordered = [&](const test::tensor_view<const T>& t) {
    const auto to = test::place_tensor<T>(plain, call.memory, batch, n, t.heads, t.width, T{});
    for (index_t b = 0; b < batch; ++b)
      for (index_t j = 0; j < n; ++j)
        for (index_t h = 0; h < t.heads; ++h)
          std::copy_n(t.at(b, keys[static_cast<std::size_t>(j)], h), t.width, to.at(b, j, h));
    return to;
  };
  a.k = reordered(from.k), a.v = reordered(from.v);
  a.mask = {};
  logit_rules<R> rules[2];
  for (int m = 0; m < 2; ++m) {
    const logit_rules<R>& r = rules_of(from, m);
    rules[m].soft_cap = r.soft_cap, rules[m].sinks = r.sinks;
    rules[m].bias = {call.memory.keep(std::move(bias[m])), heads * q_len * n, q_len * n, n, 1};
  }
  a.logits = rules[0], a.logits_2 = call.memory.keep_one(rules[1]);
  return a;
}

test::random_source any_random(choices& c) {
  return test::random_source(static_cast<std::uint64_t>(c.integer(0, 255)));
}
std::vector<index_t> counted(index_t n) {
  std::vector<index_t> list(static_cast<std::size_t>(n));
  std::iota(list.begin(), list.end(), index_t{0});
  return list;
}
std::vector<index_t> shuffled(index_t n, test::random_source random) {
  std::vector<index_t> list = counted(n);
  for (index_t i = n; i > 1; --i)
    std::swap(list[static_cast<std::size_t>(i - 1)], list[static_cast<std::size_t>(random.integer(0, i - 1))]);
  return list;
}

// ---------------------------------------------------------------------------------------------- within the bound

template <class T>
AssertionResult agrees_with_the_reference(any_call<T>& call, choices& c) {
  const forward_args<T>& a = call.args;
  if (a.mask.query_starts || c.coin()) return near(a, run(a), expect(a));
  const auto any_storage = [&] {
    return std::is_same_v<T, double> ? test::storage::f64 : test::float_storages[c.integer(0, 4)];
  };
  const test::cache_choice kind = test::all_caches[c.integer(0, 4)];
  const test::storage keys = any_storage(), values = any_storage();
  const call_from_cache<T> cached(c, a, kind, keys, values);
  AssertionResult r = near(cached.args, run(cached.args), expect(cached.args));
  return r ? r : r << "\n" << kind.text() << ", keys " << test::name(keys) << ", values " << test::name(values);
}

template <class T>
AssertionResult keys_in_any_order(any_call<T>& call, choices& c) {
  const forward_args<T> permuted = explicit_call(call, shuffled(call.args.k.tokens, any_random(c)));
  return near(permuted, run(permuted), expect(call.args));
}

/// Adds numbers to the rows of both maps, and as much to their sinks.
template <class T, class R = diffattn::compute_type<T>>
AssertionResult constants_on_rows(any_call<T>& call, choices& c) {
  forward_args<T> a = explicit_call(call, counted(call.args.k.tokens));
  expectation expected = expect(a);
  test::random_source random = any_random(c);
  std::size_t map = 2;  // change_rules begins with the second one
  change_rules(call.memory, a, [&](logit_rules<R>& r) {
    --map;
    const index_t size = c.integer(1, 16);
    std::vector<R> bias(r.bias.data, r.bias.data + a.q.batch * r.bias.batch_stride), sinks;
    std::size_t row = 0;
    const auto of_head = [](index_t h) { return static_cast<R>(h % 3 - 1); };  // a sink is a logit of all rows of a head
    for (index_t b = 0; b < a.q.batch; ++b)
      for (index_t i = 0; i < a.q.tokens; ++i)
        for (index_t h = 0; h < a.out.heads; ++h) {
          const R x = r.sinks ? of_head(h) : static_cast<R>(random.integer(-1, 1) * size);
          for (index_t j = 0; j < a.k.tokens; ++j) bias[static_cast<std::size_t>(r.bias.at(b, h, i, j) - r.bias.data)] += x;
          expected.value.lse[map][row++] += double(x);
        }
    r.bias.data = call.memory.keep(std::move(bias));
    for (index_t h = 0; r.sinks && h < a.out.heads; ++h) sinks.push_back(r.sinks[h] + of_head(h));
    if (r.sinks) r.sinks = call.memory.keep(std::move(sinks));
  });
  expected.tolerance = expect(a).tolerance;  // larger logits, larger roundings
  return near(a, run(a), expected);
}

/// The call on keys [first, end) of an explicit one.
template <class T, class R = diffattn::compute_type<T>>
diffattn::attention_part<R> attend_part(owned_arrays& memory, forward_args<T> a, index_t first, index_t end, bool has_sinks) {
  a.k = a.k.token_range(first, end - first), a.v = a.v.token_range(first, end - first);
  change_rules(memory, a, [&](logit_rules<R>& r) {
    r.bias.data += first;
    if (!has_sinks) r.sinks = nullptr;
  });
  ask_for_all(memory, a);
  run(a);
  const auto constant = [](const test::token_head_view<R>& v) {
    return test::token_head_view<const R>{v.data, v.batch_stride, v.token_stride, v.head_stride};
  };
  return {a.out1, a.out2, constant(a.lse1), constant(a.lse2)};
}

/// The factors of both maps for each number of `out` without a norm: f(element, α · weight, λ · weight).
template <class T, class F>
void for_each_mix(const forward_args<T>& a, F&& f) {
  std::size_t element = 0;
  for (index_t b = 0; b < a.out.batch; ++b)
    for (index_t i = 0; i < a.out.tokens; ++i)
      for (index_t h = 0; h < a.out.heads; ++h)
        for (index_t c = 0; c < a.out.width; ++c) {
          const double weight = (a.norm.weight ? double(a.norm.weight[c]) : 1) * double(a.norm.gain);
          f(element++, double(a.alpha.at(b, i, h)) * weight, double(a.lambda.at(b, i, h)) * weight);
        }
}

/// Bounds for merged parts: those of one call, and more, since the distance of a part's log-sum-exp from the whole one errs by
/// both errors, the mean of all distances by as much, and the exponential of a distance by as many units as it is long.
template <class T, class R = diffattn::compute_type<T>>
expectation expect_merged(const forward_args<T>& a) {
  expectation e = expect(a);
  const double u = double(std::numeric_limits<R>::epsilon()) / 2;
  double largest = 0;
  test::for_each(a.v, [&](T x) {
    if (std::isfinite(test::number(x))) largest = std::max(largest, std::fabs(test::number(x)));
  });
  for (std::vector<double>& map : e.tolerance.lse)
    for (double& x : map) x = 4 * x + 64 * u;
  for_each_mix(a, [&](std::size_t i, double alpha, double lambda) {
    const double factors[] = {alpha, lambda};
    for (std::size_t m = 0; m < 2; ++m) {
      const double more = largest * e.tolerance.lse[m][i / static_cast<std::size_t>(a.out.width)];
      e.tolerance.raw[m][i] += more;
      e.tolerance.out[i] += std::fabs(factors[m]) * (more + 4 * u * std::fabs(e.value.raw[m][i]));
    }
  });
  return e;
}

template <class T, class R = diffattn::compute_type<T>>
AssertionResult merged_parts(any_call<T>& call, choices& c) {
  call.args.norm.kind = diffattn::norm_kind::none, call.args.norm.bias = nullptr;
  forward_args<T> a = explicit_call(call, counted(call.args.k.tokens));
  std::vector<index_t> cuts{0, a.k.tokens};
  for (index_t i = c.integer(1, 3); i > 0; --i) cuts.push_back(c.integer(0, a.k.tokens));
  std::sort(cuts.begin(), cuts.end());
  std::vector<diffattn::attention_part<R>> parts;
  for (std::size_t p = 0; p + 1 < cuts.size(); ++p) parts.push_back(attend_part(call.memory, a, cuts[p], cuts[p + 1], p == 0));
  ask_for_all(call.memory, a);
  diffattn::merge_args<T> m;
  m.parts = parts.data(), m.count = static_cast<index_t>(parts.size()), m.out = a.out, m.lambda = a.lambda, m.alpha = a.alpha;
  m.norm = a.norm, m.lse1 = a.lse1, m.lse2 = a.lse2, m.out1 = a.out1, m.out2 = a.out2;
  diffattn::throw_if_error(test::run(m));
  return near(a, results_of(a), expect_merged(a));
}

template <class T>
AssertionResult linear_in_lambda(any_call<T>& call, choices&) {
  forward_args<T>& a = call.args;
  a.norm.kind = diffattn::norm_kind::none, a.norm.bias = nullptr;
  ask_for_all(call.memory, a);
  const results r = run(a);
  expectation e = expect(a);
  for_each_mix(a, [&](std::size_t i, double alpha, double lambda) {
    e.value.out[i] = alpha * r.raw[0][i] - lambda * r.raw[1][i];
    e.tolerance.out[i] += std::fabs(alpha) * e.tolerance.raw[0][i] + std::fabs(lambda) * e.tolerance.raw[1][i];
  });
  return near(a, r, e);
}

RC_GTEST_PROP(Property, AgreesWithTheReference, ()) {
  holds(of_any_call([](auto& call, choices& c) { return agrees_with_the_reference(call, c); }));
}
RC_GTEST_PROP(Property, KeysInAnyOrderGiveTheSame, ()) {
  holds(of_any_call([](auto& call, choices& c) { return keys_in_any_order(call, c); }));
}
RC_GTEST_PROP(Property, AConstantOnARowOfLogitsChangesNothing, ()) {
  holds(of_any_call([](auto& call, choices& c) { return constants_on_rows(call, c); }));
}
RC_GTEST_PROP(Property, MergedPartsAreTheWhole, ()) {
  holds(of_any_call([](auto& call, choices& c) { return merged_parts(call, c); }));
}
RC_GTEST_PROP(Property, LinearInLambda, ()) {
  holds(of_any_call([](auto& call, choices& c) { return linear_in_lambda(call, c); }));
}

// ---------------------------------------------------------------------------------------------- bit for bit

/// Differential head h does what head order[h] did: a table, and every array of heads in that order.
template <class T, class R = diffattn::compute_type<T>>
forward_args<T> with_heads_in_order(any_call<T>& call, const std::vector<index_t>& order) {
  forward_args<T> a = call.args;
  owned_arrays& memory = call.memory;
  const index_t batch = a.q.batch, heads = a.out.heads, q_len = a.q.tokens, n = a.k.tokens;
  const auto old = [&](index_t h) { return order[static_cast<std::size_t>(h)]; };
  std::vector<diffattn::head_indices> table;
  for (index_t h = 0; h < heads; ++h) table.push_back(a.heads[old(h)]);
  a.heads = diffattn::head_map::table(memory.keep(std::move(table)), heads);
  for (diffattn::lambda_view<R>* x : {&a.alpha, &a.lambda}) {
    std::vector<R> to;
    for (index_t b = 0; b < batch; ++b)
      for (index_t i = 0; i < q_len; ++i)
        for (index_t h = 0; h < heads; ++h) to.push_back(x->at(b, i, old(h)));
    *x = diffattn::lambda_view<R>::per_token(memory.keep(std::move(to)), q_len, heads);
  }
  const auto reorder = [&](const R*& x) {
    std::vector<R> to;
    for (index_t h = 0; x && h < heads; ++h) to.push_back(x[old(h)]);
    if (x) x = memory.keep(std::move(to));
  };
  const auto reorder_view = [&](auto& v) {
    std::vector<std::decay_t<decltype(*v.data)>> to;
    if (!v.data) return;
    for (index_t b = 0; b < batch; ++b)
      for (index_t h = 0; h < heads; ++h)
        for (index_t i = 0; i < q_len; ++i)
          for (index_t j = 0; j < n; ++j) to.push_back(*v.at(b, old(h), i, j));
    v = {memory.keep(std::move(to)), heads * q_len * n, q_len * n, n, 1};
  };
  change_rules(memory, a, [&](logit_rules<R>& r) {
    reorder(r.slopes), reorder(r.sinks), reorder_view(r.bias), reorder_view(r.visible);
    move_predicate(memory, r, {{}, 0, 0, order});
    if (!r.blocks.begins) return;
    const index_t begins = (q_len + r.blocks.query_block - 1) / r.blocks.query_block + 1;
    std::vector<index_t> to;
    for (index_t b = 0; b < batch; ++b)
      for (index_t h = 0; h < heads; ++h) to.insert(to.end(), r.blocks.row(b, old(h), 0), r.blocks.row(b, old(h), 0) + begins);
    r.blocks.begins = memory.keep(std::move(to)), r.blocks.batch_stride = heads * begins, r.blocks.head_stride = begins;
  });
  return a;
}

template <class T>
AssertionResult heads_in_any_order(any_call<T>& call, choices& c) {
  const index_t heads = call.args.out.heads;
  const std::vector<index_t> order = shuffled(heads, any_random(c));
  const results before = run(call.args), after = run(with_heads_in_order(call, order));
  const auto back = [&](const std::vector<double>& x, index_t width) {
    std::vector<double> to(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const index_t at = static_cast<index_t>(i), row = at / width, h = order[static_cast<std::size_t>(row % heads)];
      to[static_cast<std::size_t>((row / heads * heads + h) * width + at % width)] = x[i];
    }
    return to;
  };
  results reordered{back(after.out, call.args.out.width), {}, {}};
  for (int m = 0; m < 2; ++m)
    reordered.raw[m] = back(after.raw[m], call.args.out.width), reordered.lse[m] = back(after.lse[m], 1);
  return same(call.args, reordered, before);
}

template <class T>
AssertionResult entries_one_by_one(any_call<T>& call, choices&) {
  const results together = run(call.args);
  for (index_t b = 0; b < call.args.q.batch; ++b) run(part_of(call, b, 1, 0, call.args.q.tokens));
  return same(call.args, results_of(call.args), together);
}

template <class T, class R = diffattn::compute_type<T>>
AssertionResult queries_in_parts(any_call<T>& call, choices& c) {
  forward_args<T>& a = call.args;
  // Roundings are those of a schedule.
  if (a.schedule == schedule_choice::automatic) a.schedule = schedule_choice::panels;
  index_t unit = 1;
  bool has_slopes = false;
  change_rules(call.memory, a, [&](logit_rules<R>& r) {
    if (r.blocks.begins) unit = std::lcm(unit, r.blocks.query_block);
    has_slopes |= r.slopes != nullptr;
  });
  // A part must be told where its queries are: only causal calls have an offset, and packed sequences end at their last query.
  if (a.mask.query_starts ? a.mask.causal || has_slopes : has_slopes && !a.mask.causal) return AssertionSuccess();
  const results together = run(a);
  for (index_t first = 0, count; first < a.q.tokens; first += count) {
    count = std::min(unit * c.integer(1, 20), a.q.tokens - first);
    run(part_of(call, 0, a.q.batch, first, count));
  }
  return same(a, results_of(a), together);
}

/// Tasks in any order, each by any worker.
class shuffled_executor : public test::any_executor {
 public:
  shuffled_executor(index_t workers, test::random_source random) : workers_(workers), random_(random) {}
  index_t workers() const noexcept override { return workers_; }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    for (const index_t task : shuffled(tasks, random_)) f(context, task, random_.integer(0, workers_ - 1));
  }

 private:
  index_t workers_;
  test::random_source random_;
};

class eigen_pool : public test::any_executor {
 public:
  explicit eigen_pool(int threads) : pool_(threads), device_(&pool_, threads) {}
  index_t workers() const noexcept override { return device_.numThreads(); }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    diffattn::eigen_executor(device_).run(tasks, [&](index_t task, index_t worker) { f(context, task, worker); });
  }

 private:
  Eigen::ThreadPool pool_;
  Eigen::ThreadPoolDevice device_;
};

template <class T>
AssertionResult any_workers(any_call<T>& call, choices& c, eigen_pool& pool) {
  const results serial = run(call.args);
  const index_t workers = c.pick<index_t>({2, 1, 3, 16});
  shuffled_executor shuffle(workers, any_random(c));
  const AssertionResult r = same(call.args, run(call.args, shuffle), serial);
  return r ? same(call.args, run(call.args, pool), serial) : r;
}

/// Tensors elsewhere in other strides, and other optional outputs.
template <class T>
AssertionResult any_strides(any_call<T>& call, choices& c) {
  forward_args<T>& a = call.args;
  results before = run(a);
  a.q = copied(c, call.memory, a.q), a.k = copied(c, call.memory, a.k), a.v = copied(c, call.memory, a.v);
  a.out1 = a.out2 = {}, a.lse1 = a.lse2 = {};
  call.place_outputs(c, true);
  results after = run(a);
  for (int m = 0; m < 2; ++m) {  // what only one call gave
    if (before.raw[m].empty()) after.raw[m].clear();
    if (before.lse[m].empty()) after.lse[m].clear();
  }
  return same(a, after, before);
}

template <class T>
AssertionResult any_cache(any_call<T>& call, choices& c) {
  const forward_args<T>& a = call.args;
  if (a.mask.query_starts) return AssertionSuccess();
  // Of the element's own type a cache is like the tensors; of another one, all kinds are alike.
  const bool own = std::is_same_v<T, double> || c.coin();
  const test::storage type = own ? diffattn::storage_of<T> : test::float_storages[c.integer(0, 4)];
  results first;
  if (own) first = run(a);
  for (const test::cache_choice& kind : test::all_caches) {
    const call_from_cache<T> cached(c, a, kind, type, type);
    const std::vector<unsigned char> before = cached.cache.memory();
    const results r = run(cached.args);
    if (cached.cache.memory() != before) return AssertionFailure() << "written to the cache";
    if (first.out.empty()) first = r;
    AssertionResult equal = same(a, r, first);
    if (!equal) return equal << "\n" << kind.text() << " of " << test::name(type);
  }
  return AssertionSuccess();
}

/// λ = 0 against standard attention of the first map's heads.
template <class T, class R = diffattn::compute_type<T>>
AssertionResult standard_attention(any_call<T>& call, choices& c) {
  forward_args<T>& a = call.args;
  a.lambda = R(0), a.alpha = R(1), a.norm = diffattn::head_norm<R>::none();
  a.out1 = a.out2 = {}, a.lse2 = {};
  results differential = run(a);
  diffattn::attention_args<T> one;
  const auto gather = [&](const test::tensor_view<const T>& t, index_t width, auto&& head) {
    const auto to = test::place_tensor<T>(c, call.memory, t.batch, t.tokens, a.out.heads, width, T{});
    for (index_t b = 0; b < t.batch; ++b)
      for (index_t i = 0; i < t.tokens; ++i)
        for (index_t h = 0; h < a.out.heads; ++h)
          for (index_t x = 0; x < width; ++x) to.at(b, i, h)[x] = t.at(b, i, head(a.heads[h], x / t.width))[x % t.width];
    return to;
  };
  one.q = gather(a.q, a.q.width, [](const diffattn::head_indices& h, index_t) { return h.query_1; });
  one.k = gather(a.k, a.k.width, [](const diffattn::head_indices& h, index_t) { return h.key_1; });
  one.v =
      gather(a.v, a.out.width, [](const diffattn::head_indices& h, index_t half) { return half == 0 ? h.value_1 : h.value_2; });
  one.out = a.out, one.mask = a.mask, one.logits = a.logits, one.scale = a.scale, one.lse = a.lse1, one.schedule = a.schedule;
  diffattn::throw_if_error(test::run(one));
  results standard = results_of(a);
  // What only map 2 sees is 0 times something, of either sign.
  for (std::vector<double>* out : {&standard.out, &differential.out})
    for (double& x : *out) x += 0.0;
  return same(a, standard, differential);
}

RC_GTEST_PROP(Property, HeadsDoNotKnowTheirOrder, ()) {
  holds(of_any_call([](auto& call, choices& c) { return heads_in_any_order(call, c); }));
}
RC_GTEST_PROP(Property, EntriesDoNotKnowEachOther, ()) {
  holds(of_any_call([](auto& call, choices& c) { return entries_one_by_one(call, c); }));
}
RC_GTEST_PROP(Property, QueriesDoNotKnowEachOther, ()) {
  holds(of_any_call([](auto& call, choices& c) { return queries_in_parts(call, c); }));
}
RC_GTEST_PROP(Property, WorkersDoNotMatter, ()) {
  static eigen_pool pool(3);
  holds(of_any_call([](auto& call, choices& c) { return any_workers(call, c, pool); }));
}
RC_GTEST_PROP(Property, StridesAndOptionalOutputsDoNotMatter, ()) {
  holds(of_any_call([](auto& call, choices& c) { return any_strides(call, c); }));
}
RC_GTEST_PROP(Property, CachesDoNotMatter, ()) {
  holds(of_any_call([](auto& call, choices& c) { return any_cache(call, c); }));
}
RC_GTEST_PROP(Property, WithoutTheSecondMapItIsStandardAttention, ()) {
  holds(of_any_call([](auto& call, choices& c) { return standard_attention(call, c); }));
}

}  // namespace
