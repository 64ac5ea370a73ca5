// SPDX-License-Identifier: MIT
// Bytes as a call, often with something wrong: either a status, and nothing is written, or the results of the reference and
// nothing else is written. What no check can know, a pointer to less memory than the call says, is not tried.
// For libFuzzer (-fsanitize=fuzzer), or with replay.cpp.

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "../support/any_call.hpp"
#include "../support/calls.hpp"

namespace {

using diffattn::index_t;
using diffattn::status;
using test::any_call;
using test::call_from_cache;
using test::choices;
using test::for_each;
using test::forward_args;
using test::logit_rules;
using test::pieces_of;
using test::results_of;
using test::rules_of;

/// Ends the program unless `fine`.
void demand(bool fine, const std::string& what, const std::string& call) {
  if (fine) return;
  std::fprintf(stderr, "%s\n%s\n", what.c_str(), call.c_str());
  std::abort();
}

/// Tasks backwards, dealt out in turns.
class backwards : public test::any_executor {
 public:
  explicit backwards(index_t workers) : workers_(workers) {}
  index_t workers() const noexcept override { return workers_; }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    while (tasks-- > 0) f(context, tasks, tasks % workers_);
  }

 private:
  index_t workers_;
};

// ---------------------------------------------------------------------------------------------- spoiling

constexpr index_t most = std::numeric_limits<index_t>::max(), least = std::numeric_limits<index_t>::min();

/// Any number where `old` was.
index_t odd(choices& c, index_t old) {
  const auto wrapped = [old](std::uint64_t factor, std::uint64_t plus) {
    return static_cast<index_t>(static_cast<std::uint64_t>(old) * factor + plus);
  };
  return c.pick<index_t>({0, 1, -1, wrapped(1, ~std::uint64_t{0}), wrapped(1, 1), wrapped(~std::uint64_t{0}, 0), wrapped(2, 0),
                          7, 1000, index_t{1} << 31, index_t{1} << 54, -(index_t{1} << 54), index_t{1} << 60, most, least});
}
/// A size of arrays that `check` reads: not more than there is, unless it is impossible.
index_t odd_size(choices& c, index_t old) {
  return c.pick<index_t>({0, -1, std::max(old, index_t{1}) - 1, index_t{1} << 55, index_t{1} << 60, most, least});
}
template <class R>
R odd_real(choices& c) {
  return static_cast<R>(c.pick<double>({NAN, -1, INFINITY, -INFINITY, double(std::numeric_limits<R>::max()), 0, 1e-30, 1e20}));
}

/// The array with one of its n numbers odd.
template <class E, class F>
const E* with_odd(choices& c, test::owned_arrays& memory, const E* array, index_t n, F&& change) {
  if (!array) return nullptr;
  std::vector<E> changed(array, array + n);
  if (n > 0) change(changed[static_cast<std::size_t>(c.integer(0, n - 1))]);
  return memory.keep(std::move(changed));
}

template <class T>
void spoil_tensor(choices& c, test::tensor_view<T>& t, bool sizes_arrays) {
  index_t* const sizes[] = {&t.batch, &t.tokens, &t.heads};
  index_t* const others[] = {&t.batch_stride, &t.token_stride, &t.head_stride, &t.width_stride, &t.width};
  const index_t which = c.integer(0, 8);
  if (which < 5)
    *others[which] = odd(c, *others[which]);
  else if (which < 8)
    *sizes[which - 5] = sizes_arrays ? odd_size(c, *sizes[which - 5]) : odd(c, *sizes[which - 5]);
  else
    t.data = nullptr;
}

template <class T>
void spoil_coefficient(choices& c, diffattn::lambda_view<diffattn::compute_type<T>>& x, const forward_args<T>& a) {
  using view = diffattn::lambda_view<diffattn::compute_type<T>>;
  auto array = x.array();
  switch (c.integer(0, 3)) {
    case 0: x = view(); break;
    case 1: x = view::per_head(nullptr); break;
    case 2: x = view::per_token(array.data, a.q.tokens + c.integer(0, 1), a.heads.heads + c.integer(0, 1)); break;
    default:
      index_t* const strides[] = {&array.batch_stride, &array.token_stride, &array.head_stride};
      index_t& stride = *strides[c.integer(0, 2)];
      stride = odd(c, stride), x = view::strided(array);
  }
}

/// `heads` entries have been made for a table.
void spoil_heads(choices& c, diffattn::head_map& m, index_t heads, test::owned_arrays& memory) {
  using diffattn::head_map;
  switch (c.integer(0, 6)) {
    case 0: m.heads = c.pick<index_t>({0, -1, std::max(m.heads, index_t{1}) - 1, index_t{1} << 25, most, least}); break;
    case 1: m.kv = odd(c, m.kv); break;
    case 2: m.ratio = odd(c, m.ratio); break;
    case 3: m.keys = static_cast<head_map::grouping>(c.integer(0, 5)); break;
    case 4: m.values = static_cast<diffattn::value_layout>(c.integer(0, 3)); break;
    case 5:
      if (m.queries != head_map::pairing::table) m.queries = static_cast<head_map::pairing>(c.pick({0, 1, 2, 3, 9}));
      break;
    default:
      if (m.queries != head_map::pairing::table) break;
      if (c.coin()) return void(m.entries = nullptr);
      m.entries = with_odd(c, memory, m.entries, std::min(m.heads, heads), [&](diffattn::head_indices& h) {
        index_t* const all[] = {&h.query_1, &h.query_2, &h.key_1, &h.key_2, &h.value_1, &h.value_2};
        index_t& i = *all[c.integer(0, 5)];
        i = odd(c, i);
      });
  }
}

template <class T>
void spoil_mask(choices& c, forward_args<T>& a, index_t batch, test::owned_arrays& memory) {
  diffattn::attention_mask& m = a.mask;
  const auto odd_start = [&](std::int32_t& x) { x = c.pick<std::int32_t>({0, -1, x - 1, x + 1, 1000, 1 << 30, -(1 << 30)}); };
  switch (c.integer(0, 6)) {
    case 0: m.causal = !m.causal; break;
    case 1: m.offset = odd(c, m.offset == least ? 0 : m.offset / 4); break;
    case 2: m.window = odd(c, m.window); break;
    case 3:
      if (m.key_ranges)
        m.key_ranges = with_odd(c, memory, m.key_ranges, batch,
                                [&](diffattn::key_range& r) { (c.coin() ? r.begin : r.end) = odd(c, r.end); });
      break;
    case 4:
      if (m.prefixes && !m.query_starts)
        m.prefixes = with_odd(c, memory, m.prefixes, batch, [&](index_t& n) { n = odd(c, n); });
      break;
    case 5:
      if (!m.query_starts || !m.key_starts || m.sequences <= 0) break;
      (c.coin() ? m.query_starts : m.key_starts) =
          with_odd(c, memory, c.coin() ? m.query_starts : m.key_starts, m.sequences + 1, odd_start);
      break;
    default:
      if (c.coin()) m.sequences = c.pick<index_t>({0, -1, least, std::max(m.sequences, index_t{1}) - 1});
      (c.coin() ? m.query_starts : m.key_starts) = nullptr;
  }
}

template <class R>
void spoil_rules(choices& c, logit_rules<R>& r, test::owned_arrays& memory) {
  constexpr index_t one_block = index_t{1} << 40;
  const auto odd_stride = [&](auto& v) {
    index_t* const strides[] = {&v.batch_stride, &v.head_stride, &v.query_stride, &v.key_stride};
    index_t& stride = *strides[c.integer(0, 3)];
    stride = odd(c, stride);
  };
  switch (c.integer(0, 5)) {
    case 0: r.soft_cap = odd_real<R>(c); break;
    case 1: odd_stride(r.bias); break;
    case 2: odd_stride(r.visible); break;
    case 3: r.predicate.sees = nullptr; break;
    case 4: r.blocks.key_block = odd(c, r.blocks.key_block); break;
    default:
      if (!r.blocks.begins) break;
      if (c.one_in(4)) return void(r.blocks.keys = nullptr);
      if (c.coin() && r.blocks.query_block < one_block)
        return void(r.blocks.query_block = c.pick<index_t>({0, -1, 41, 1000, one_block}));
      // The keys of the first row of the first list, for all.
      r.blocks.keys = with_odd(c, memory, r.blocks.keys, r.blocks.begins[1], [&](index_t& k) { k = odd(c, k); });
      r.blocks.batch_stride = r.blocks.head_stride = 0, r.blocks.query_block = one_block;
  }
}

template <class T>
void spoil_cache(choices& c, forward_args<T>& a, index_t batch, index_t heads, test::owned_arrays& memory) {
  diffattn::kv_view& v = a.cache;
  if (!v.is_given()) {
    if (c.coin()) a.sequences = memory.keep(std::vector<index_t>(3));
    return;
  }
  diffattn::kv_rows& rows = c.coin() ? v.keys : v.values;
  index_t* const any[] = {&rows.heads,        &rows.width,    &rows.page_stride, &rows.head_stride,
                          &rows.token_stride, &v.page_tokens, &v.same_length};
  index_t* const sizes[] = {&v.sequences, &v.pages, &v.table_pages};
  const index_t sequences = batch + 1;
  const std::vector<index_t> zeros(static_cast<std::size_t>(sequences));
  const index_t which = c.integer(0, 17);
  if (which < 7)
    *any[which] = odd(c, *any[which]);
  else if (which < 10)
    *sizes[which - 7] = odd_size(c, *sizes[which - 7]);
  else if (which == 10)
    rows.type = static_cast<diffattn::storage>(c.integer(0, 7));
  else if (which == 11)
    v.lengths = nullptr, v.same_length = c.integer(-1, 20);
  else if (which == 12)
    v.lengths = with_odd(c, memory, v.lengths ? v.lengths : zeros.data(), sequences, [&](index_t& n) { n = odd(c, n); });
  else if (which == 13)
    v.begins = with_odd(c, memory, zeros.data(), sequences, [&](index_t& n) { n = odd(c, n); });
  else if (which == 14 && v.table && v.sequences > 0 && v.sequences <= 4 && v.table_pages > 0 && v.table_pages < 4096)
    v.table = with_odd(c, memory, v.table, v.sequences * v.table_pages, [&](std::int32_t& p) {
      p = c.pick<std::int32_t>({0, -1, p - 1, 1 << 30, -(1 << 30)});
    });
  else if (which == 15)
    a.sequences = with_odd(c, memory, a.sequences, batch, [&](index_t& s) { s = odd(c, s); });
  else if (which == 16)
    spoil_heads(c, v.heads, heads, memory);
  else
    rows.data = nullptr;
}

/// Makes something wrong, or just unusual.
template <class T>
void spoil(choices& c, any_call<T>& call, forward_args<T>& a) {
  using R = diffattn::compute_type<T>;
  auto* const lse = c.coin() ? &a.lse1 : &a.lse2;
  switch (c.integer(0, 15)) {
    case 0: spoil_tensor(c, a.q, true); break;
    case 1: spoil_tensor(c, a.k, false); break;
    case 2: spoil_tensor(c, a.v, false); break;
    case 3: spoil_tensor(c, a.out, true); break;
    case 4: spoil_tensor(c, c.coin() ? a.out1 : a.out2, false); break;
    case 5: spoil_coefficient(c, c.coin() ? a.lambda : a.alpha, call.args); break;
    case 6: spoil_heads(c, a.heads, call.args.heads.heads, call.memory); break;
    case 7: spoil_mask(c, a, call.args.q.batch, call.memory); break;
    case 8:
      if (call.args.q.batch * call.args.q.tokens > 0) spoil_rules(c, a.logits, call.memory);
      break;
    case 9: spoil_cache(c, a, call.args.q.batch, call.args.heads.heads, call.memory); break;
    case 10: (c.coin() ? a.norm.eps : a.norm.gain) = odd_real<R>(c); break;
    case 11: a.scale = odd_real<R>(c); break;
    case 12: a.schedule = static_cast<diffattn::schedule_choice>(c.integer(0, 5)); break;
    case 13: a.norm.bias = a.norm.weight; break;
    case 14: {
      index_t* const strides[] = {&lse->batch_stride, &lse->token_stride, &lse->head_stride};
      index_t& stride = *strides[c.integer(0, 2)];
      stride = odd(c, stride);
      break;
    }
    default:  // outputs on top of each other or of inputs
      if (c.coin())
        a.out.data = const_cast<T*>(c.coin() ? a.q.data : a.v.data);
      else
        lse->data = const_cast<R*>(c.coin() ? a.out1.data : a.lambda.array().data);
  }
}

// ---------------------------------------------------------------------------------------------- running

/// Does all that an accepted call names lie in memory of ours?
template <class T>
bool memory_is_real(const forward_args<T>& a, const std::vector<test::owned_arrays::piece>& pieces) {
  using R = diffattn::compute_type<T>;
  index_t keys = 0;
  for (const test::sequence_piece& s : pieces_of(a)) keys = std::max(keys, s.first_key + s.keys);
  bool real = true;
  struct axis {
    index_t size, stride;
  };
  const auto see = [&](const auto* data, std::initializer_list<axis> axes, index_t size) {
    if (!data) return;
    index_t low = 0, high = 0;
    for (const axis& x : axes) {
      if (x.size <= 0) return;
      (x.stride < 0 ? low : high) += (x.size - 1) * x.stride;
    }
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t begin = at + static_cast<std::uintptr_t>(low * size),
                         end = at + static_cast<std::uintptr_t>((high + 1) * size);
    bool found = false;
    for (const auto& p : pieces) {
      // In its own array: what lies in a neighbour is there by chance.
      const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(p.data), to = from + p.bytes;
      found |= from <= at && at < to && from <= begin && begin < end && end <= to;
    }
    real &= found;
  };
  const auto see_tensor = [&](const auto& t) {
    see(t.data, {{t.batch, t.batch_stride}, {t.tokens, t.token_stride}, {t.heads, t.head_stride}, {t.width, 1}},
        static_cast<index_t>(sizeof(*t.data)));
  };
  const auto& o = a.out;
  const auto see_rows = [&](const auto& v) {
    see(v.data, {{o.batch, v.batch_stride}, {o.tokens, v.token_stride}, {o.heads, v.head_stride}},
        static_cast<index_t>(sizeof(*v.data)));
  };
  see_tensor(a.q), see_tensor(a.k), see_tensor(a.v), see_tensor(a.out), see_tensor(a.out1), see_tensor(a.out2);
  see_rows(a.lse1), see_rows(a.lse2), see_rows(a.lambda.array()), see_rows(a.alpha.array());
  constexpr index_t size = static_cast<index_t>(sizeof(R));
  see(a.norm.weight, {{o.width, 1}}, size), see(a.norm.bias, {{o.width, 1}}, size);
  for (int m = 0; m < 2; ++m) {
    const logit_rules<R>& r = rules_of(a, m);
    const auto see_logits = [&](const auto& v) {
      see(v.data, {{o.batch, v.batch_stride}, {o.heads, v.head_stride}, {o.tokens, v.query_stride}, {keys, v.key_stride}},
          static_cast<index_t>(sizeof(*v.data)));
    };
    see_logits(r.bias), see_logits(r.visible);
    see(r.slopes, {{o.heads, 1}}, size), see(r.sinks, {{o.heads, 1}}, size);
  }
  for (const diffattn::kv_rows* rows : {&a.cache.keys, &a.cache.values})
    see(static_cast<const unsigned char*>(rows->data),
        {{a.cache.pages, rows->page_stride},
         {rows->heads, rows->head_stride},
         {a.cache.page_tokens, rows->token_stride},
         {row_bytes(rows->type, rows->width), 1}},
        1);
  // Stride 0 makes large calls of little memory.
  const double rows = double(o.batch) * double(o.heads) * double(o.tokens), width = double(2 * a.q.width + o.width);
  const bool cached = a.cache.is_given();
  const index_t heads = cached ? a.cache.keys.heads + a.cache.values.heads : a.k.heads + a.v.heads;
  const double read = double(heads) * double(keys) + double(a.q.heads) * double(o.tokens);
  return real && rows * double(keys) * width < 5e5 && double(o.batch) * read * width < 5e5;
}

/// f for every element of every output.
template <class T, class F>
void for_each_written(const forward_args<T>& a, F&& f) {
  for_each(a.out, f);
  if (a.out1.data) for_each(a.out1, f);
  if (a.out2.data) for_each(a.out2, f);
  if (a.lse1.data) for_each(a.lse1, a.out, f);
  if (a.lse2.data) for_each(a.lse2, a.out, f);
}

template <class T>
void try_call(choices& c) {
  any_call<T> call(c, c.one_in(8) ? 20'000 : 2'000);
  std::optional<call_from_cache<T>> cached;
  if (!call.args.mask.query_starts && c.one_in(3)) {
    const auto type = [&] { return std::is_same_v<T, double> ? test::storage::f64 : test::float_storages[c.integer(0, 4)]; };
    const test::cache_choice kind = test::all_caches[c.integer(0, 4)];
    const test::storage keys = type(), values = type();
    cached.emplace(c, call.args, kind, keys, values);
  }
  forward_args<T> a = cached ? cached->args : call.args;
  const index_t faults = c.pick<index_t>({0, 1, 1, 2, 3});
  for (index_t i = 0; i < faults; ++i) spoil(c, call, a);
  const index_t workers = c.pick<index_t>({1, 2, 3, 0, most});
  if (a.q.batch > call.args.q.batch && a.q.batch == a.out.batch) return;  // no array is as long

  std::vector<test::owned_arrays::piece> pieces = call.memory.pieces();
  if (cached) pieces.push_back({const_cast<unsigned char*>(cached->cache.memory().data()), cached->cache.memory().size()});
  std::vector<std::vector<unsigned char>> before;
  for (const auto& p : pieces) before.emplace_back(p.data, p.data + p.bytes);
  const auto unchanged = [&] {
    for (std::size_t i = 0; i < pieces.size(); ++i)
      if (!std::equal(before[i].begin(), before[i].end(), pieces[i].data)) return false;
    return true;
  };
  const std::string text = call.text() + (cached ? " cached" : "");
  const auto expect_refusal = [&](diffattn::workspace scratch, test::any_executor& executor, status expected) {
    const status s = test::run(a, scratch, executor);
    demand(s == expected, std::string("refused otherwise: ") + message(s) + "; not " + message(expected), text);
    demand(unchanged(), std::string("written after: ") + message(s), text);
  };

  backwards executor(workers);
  const status checked = test::check(a);
  const std::size_t bytes = test::workspace_bytes(a, workers);
  if (checked != status::ok) {
    demand(bytes == 0, "a workspace for a call that is refused", text);
    return expect_refusal({}, executor, checked);
  }
  if (!memory_is_real(a, pieces)) return;
  if (workers < 1) return expect_refusal({}, executor, status::executor_workers);
  if (workers == most) return expect_refusal({}, executor, status::workspace_overflow);

  // The workspace ends with its memory, and begins anywhere.
  const std::size_t shift = static_cast<std::size_t>(c.integer(0, 3));
  std::vector<unsigned char> memory(shift + bytes, 0xff);
  const diffattn::workspace scratch{memory.data() + shift, bytes};
  if (bytes > 0 && c.one_in(8)) {
    expect_refusal({nullptr, bytes}, executor, status::workspace_null);
    expect_refusal({scratch.data, bytes - 1}, executor, status::workspace_too_small);
    expect_refusal({a.out.data, bytes}, executor, status::workspace_overlap);
  }
  std::vector<double> old;
  for_each_written(a, [&](auto x) { old.push_back(test::number(x)); });
  const status s = test::run(a, scratch, executor);
  demand(s == status::ok, std::string("refused after check: ") + message(s), text);
  const test::results results = results_of(a);
  std::size_t i = 0;
  for_each_written(a, [&](auto& x) { x = test::element<std::decay_t<decltype(x)>>(old[i++]); });
  demand(unchanged(), "written beside the outputs", text);

  // What overflows, or divides roundings by next to nothing, has no reference.
  for (index_t b = 0; b < a.out.batch; ++b)
    for (index_t t = 0; t < a.out.tokens; ++t)
      for (index_t h = 0; h < a.out.heads; ++h)
        if (!std::isfinite(a.alpha.at(b, t, h) + a.lambda.at(b, t, h))) return;
  const double largest = std::max({std::fabs(double(a.norm.gain)), std::fabs(double(a.scale)), double(a.norm.eps),
                                   double(rules_of(a, 0).soft_cap), double(rules_of(a, 1).soft_cap)});
  const bool safe_norm = a.norm.kind == diffattn::norm_kind::none || a.norm.eps > 1e-6f;
  if (largest > 1e6 || !safe_norm) return;
  const test::expectation e = test::expect(a);
  // What strides and storage types made of memory may be any number, and then even a finite result (of a soft cap) has no
  // bound.
  const auto bounded = [](const std::vector<double>& numbers, double beside) {
    return std::all_of(numbers.begin(), numbers.end(), [&](double x) { return std::fabs(x) <= 1e15 || x == beside; });
  };
  bool known = bounded(e.tolerance.out, 0);
  for (std::size_t m = 0; m < 2; ++m)
    known &= bounded(e.value.raw[m], 0) && bounded(e.value.lse[m], -INFINITY) && bounded(e.tolerance.raw[m], 0);
  if (!known) return;
  const testing::AssertionResult near = test::near(a, results, e);
  demand(near, near.message(), text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  testing::GTEST_FLAG(break_on_failure) = true;  // of the helpers that the tests share
  choices c(data, size);
  test::with_any_type(c, [&c](auto element) { try_call<decltype(element)>(c); });
  return 0;
}
