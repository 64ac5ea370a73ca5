// SPDX-License-Identifier: MIT
#pragma once

// Calls of any kind, made of choices that come from bytes: random ones in property tests, a fuzzer's elsewhere. Beside them a
// reading of any call, by the documents of its fields, for the reference: wherever its arguments lie and whoever made them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <diffattn/arguments.hpp>
#include <initializer_list>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../reference/reference.hpp"
#include "cache.hpp"
#include "compare.hpp"
#include "elements.hpp"
#include "families.hpp"
#include "random.hpp"

namespace test {

using diffattn::forward_args;
using diffattn::logit_rules;
using diffattn::tensor_view;
using diffattn::token_head_view;

/// Behind the last byte every choice is the first one, which is always the plainest: fewer and smaller bytes, plainer calls.
class choices {
 public:
  choices(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}
  explicit choices(const std::vector<std::uint8_t>& bytes) : choices(bytes.data(), bytes.size()) {}

  /// In [low, high].
  index_t integer(index_t low, index_t high) {
    const std::uint64_t span = static_cast<std::uint64_t>(high - low);
    std::uint64_t x = 0;
    for (std::uint64_t rest = span; rest > 0; rest >>= 8) x = x << 8 | byte();
    return low + static_cast<index_t>(x % (span + 1));
  }
  bool coin() { return integer(0, 1) == 1; }
  bool one_in(index_t n) { return integer(0, n - 1) == n - 1; }
  template <class T>
  T pick(std::initializer_list<T> list) {
    return list.begin()[integer(0, static_cast<index_t>(list.size()) - 1)];
  }
  bool is_done() const { return next_ == end_; }

 private:
  std::uint8_t byte() { return next_ == end_ ? std::uint8_t{0} : *next_++; }
  const std::uint8_t *next_, *end_;
};

/// Owns the arrays of a call, each by itself, so that a sanitizer sees their ends.
class owned_arrays {
 public:
  struct piece {
    unsigned char* data;
    std::size_t bytes;
  };
  template <class E>
  E* keep(std::vector<E> values) {
    const auto array = std::make_shared<std::vector<E>>(std::move(values));
    array->reserve(1);  // an empty array is no null pointer
    owners_.push_back(array);
    pieces_.push_back({reinterpret_cast<unsigned char*>(array->data()), array->size() * sizeof(E)});
    return array->data();
  }
  template <class E>
  E* keep_one(E value) {
    return keep(std::vector<E>(1, std::move(value)));
  }
  const std::vector<piece>& pieces() const { return pieces_; }

 private:
  std::vector<std::shared_ptr<void>> owners_;
  std::vector<piece> pieces_;
};

/// How the axes of an array lie in memory.
struct placed {
  std::vector<index_t> strides;
  index_t origin = 0, size = 0;
};

/// Any order of the axes, of which the last one given is innermost at first, gaps behind them, some of them backwards. Elements
/// are `width` numbers. An axis in `shared` (a bit each) has stride 0.
inline placed place(choices& c, const std::vector<index_t>& sizes, index_t width, unsigned shared = 0) {
  const std::size_t n = sizes.size();
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < n; ++i) order.push_back(i);
  index_t permutation = c.integer(0, n == 3 ? 5 : 23), gaps = c.integer(0, 255);
  placed p;
  for (std::size_t i = n; i-- > 1; permutation /= static_cast<index_t>(i + 1))
    std::swap(order[i], order[i - static_cast<std::size_t>(permutation) % (i + 1)]);
  p.strides.resize(n);
  p.size = width + gaps % 3;
  for (std::size_t i = n; i-- > 0; gaps /= 2) {
    const std::size_t axis = order[i];
    if (shared >> axis & 1) continue;
    p.strides[axis] = p.size;
    p.size = p.size * std::max(sizes[axis], index_t{1}) + gaps % 2;
    if (gaps < 32 || gaps % 4 != 3 || sizes[axis] == 0) continue;
    p.origin += (sizes[axis] - 1) * p.strides[axis], p.strides[axis] = -p.strides[axis];
  }
  return p;
}

template <class T>
tensor_view<T> place_tensor(choices& c, owned_arrays& memory, index_t batch, index_t tokens, index_t heads, index_t width,
                            T fill, unsigned shared = 0) {
  const placed p = place(c, {batch, tokens, heads}, width, shared);
  T* const data = memory.keep(std::vector<T>(static_cast<std::size_t>(p.size), fill)) + p.origin;
  return {data, batch, tokens, heads, width, p.strides[0], p.strides[1], p.strides[2], 1};
}
template <class T>
token_head_view<T> place_rows(choices& c, owned_arrays& memory, index_t batch, index_t tokens, index_t heads, T fill,
                              unsigned shared = 0) {
  const placed p = place(c, {batch, tokens, heads}, 1, shared);
  return {memory.keep(std::vector<T>(static_cast<std::size_t>(p.size), fill)) + p.origin, p.strides[0], p.strides[1],
          p.strides[2]};
}

/// f(element) for all of a tensor, or of numbers of the rows of `shape`.
template <class T, class F>
void for_each(const tensor_view<T>& t, F&& f) {
  for (index_t b = 0; b < t.batch; ++b)
    for (index_t i = 0; i < t.tokens; ++i)
      for (index_t h = 0; h < t.heads; ++h)
        for (index_t c = 0; c < t.width; ++c) f(t.at(b, i, h)[c]);
}
template <class T, class U, class F>
void for_each(const token_head_view<T>& t, const tensor_view<U>& shape, F&& f) {
  for (index_t b = 0; b < shape.batch; ++b)
    for (index_t i = 0; i < shape.tokens; ++i)
      for (index_t h = 0; h < shape.heads; ++h) f(t.at(b, i, h));
}

/// The same tensor elsewhere.
template <class T>
tensor_view<const T> copied(choices& c, owned_arrays& memory, const tensor_view<const T>& t) {
  const tensor_view<T> to = place_tensor(c, memory, t.batch, t.tokens, t.heads, t.width, element<T>(NAN));
  for (index_t b = 0; b < t.batch; ++b)
    for (index_t i = 0; i < t.tokens; ++i)
      for (index_t h = 0; h < t.heads; ++h) std::copy_n(t.at(b, i, h), t.width, to.at(b, i, h));
  return to;
}

// ---------------------------------------------------------------------------------------------- what a call says

template <class T>
const logit_rules<diffattn::compute_type<T>>& rules_of(const forward_args<T>& a, int map) {
  return map == 1 && a.logits_2 ? *a.logits_2 : a.logits;
}

/// Queries and the keys of their sequence: a batch entry, or one of those packed in it.
struct sequence_piece {
  index_t b = 0, first_query = 0, queries = 0, first_key = 0, keys = 0, offset = 0, prefix = 0;
};

template <class T>
std::vector<sequence_piece> pieces_of(const forward_args<T>& a) {
  std::vector<sequence_piece> pieces;
  const auto add = [&](sequence_piece p, index_t entry) {
    const diffattn::attention_mask& m = a.mask;
    p.offset = m.offset == m.align_to_end ? p.keys - p.queries : m.offset;
    if (m.prefixes) p.prefix = m.prefixes[entry];
    pieces.push_back(p);
  };
  const diffattn::attention_mask& m = a.mask;
  for (index_t b = 0; b < a.q.batch; ++b) {
    const index_t n = a.cache.is_given() ? a.cache.length(a.sequences ? a.sequences[b] : b) : a.k.tokens;
    if (!m.query_starts) add({b, 0, a.q.tokens, 0, n, 0, 0}, b);
    for (index_t s = 0; m.query_starts && s < m.sequences; ++s)
      add({b, m.query_starts[s], m.query_starts[s + 1] - m.query_starts[s], m.key_starts[s],
           m.key_starts[s + 1] - m.key_starts[s], 0, 0},
          s);
  }
  return pieces;
}

/// A piece for the reference, with the numbers that its problem points to.
template <class R>
struct read_problem {
  std::vector<R> q, k, v;
  reference::problem<R> problem;

  bool sees(int map, index_t h, index_t row, index_t key) const {
    return problem.allowed(0, row, key) && problem.shown(map, 0, h, row, key) &&
           problem.added(map, 0, h, row, key) != -std::numeric_limits<double>::infinity();
  }
};

/// Reads a piece of a call. `a` must outlive the result, which must not be moved.
template <class T, class R = diffattn::compute_type<T>>
void read(const forward_args<T>& a, const sequence_piece& s, read_problem<R>& to) {
  reference::problem<R>& p = to.problem;
  const index_t sequence = a.sequences ? a.sequences[s.b] : s.b;
  const bool cached = a.cache.is_given();
  const index_t key_heads = cached ? a.cache.keys.heads : a.k.heads, value_heads = cached ? a.cache.values.heads : a.v.heads;
  const index_t width = cached ? a.cache.values.width : a.v.width, d = a.q.width;
  p.q_len = s.queries, p.kv_len = s.keys, p.d = d, p.dv = a.out.width;
  for (index_t i = 0; i < s.queries; ++i)
    for (index_t h = 0; h < a.q.heads; ++h)
      for (index_t c = 0; c < d; ++c) to.q.push_back(static_cast<R>(number(a.q.at(s.b, s.first_query + i, h)[c])));
  const auto rows = [&](const tensor_view<const T>& t, const diffattn::kv_rows& r, index_t heads, index_t n,
                        std::vector<R>& x) {
    for (index_t j = s.first_key; j < s.first_key + s.keys; ++j)
      for (index_t h = 0; h < heads; ++h) {
        // What the cache does not hold, no query may see.
        const index_t page = cached && j >= a.cache.begin(sequence) ? a.cache.page(sequence, j) : -1;
        const bool held =
            page >= 0 && page < a.cache.pages && a.cache.length(sequence) - j <= a.cache.page_tokens * a.cache.table_pages;
        const unsigned char* const row = held ? stored_row(a.cache, r, sequence, j, h) : nullptr;
        for (index_t c = 0; c < n; ++c)
          x.push_back(static_cast<R>(!cached ? number(t.at(s.b, j, h)[c]) : held ? stored_number(r.type, row, c) : NAN));
      }
  };
  rows(a.k, a.cache.keys, key_heads, d, to.k), rows(a.v, a.cache.values, value_heads, width, to.v);
  p.q = {to.q.data(), 0, a.q.heads * d, d}, p.k = {to.k.data(), 0, key_heads * d, d};
  p.v = {to.v.data(), 0, value_heads * width, width};
  for (index_t h = 0; h < a.heads.heads; ++h) {
    const diffattn::head_indices i = a.heads[h];
    p.heads.push_back({{i.query_1, i.query_2}, {i.key_1, i.key_2}, i.value_1, i.value_2});
  }
  for (index_t i = s.first_query; i < s.first_query + s.queries; ++i)
    for (index_t h = 0; h < a.heads.heads; ++h) {
      p.factor[0].push_back(double(a.alpha.at(s.b, i, h)));
      p.factor[1].push_back(double(a.lambda.at(s.b, i, h)));
    }
  p.scale = a.scale == R(0) ? 1 / std::sqrt(double(d)) : double(a.scale);
  p.causal = a.mask.causal, p.offset = s.offset, p.prefix = {s.prefix};
  p.window = a.mask.window == diffattn::attention_mask::unlimited ? 0 : std::min(a.mask.window, index_t{1} << 60);
  if (a.mask.key_ranges) p.first = {a.mask.key_ranges[s.b].begin}, p.last = {a.mask.key_ranges[s.b].end};
  for (std::size_t m = 0; m < 2; ++m) {
    const logit_rules<R>& r = rules_of(a, static_cast<int>(m));
    p.cap[m] = double(r.soft_cap);
    if (r.sinks) p.sink[m].assign(r.sinks, r.sinks + a.heads.heads);
  }
  p.added = [&a, s](int m, long, long h, long i, long j) {
    const logit_rules<R>& r = rules_of(a, m);
    double sum = r.slopes ? -double(r.slopes[h]) * double(std::labs(i + s.offset - j)) : 0.0;
    if (!r.bias.data) return sum;
    const double bias = double(*r.bias.at(s.b, h, s.first_query + i, s.first_key + j));
    constexpr double most = double(std::numeric_limits<R>::max()) / 1.4426950408889634;  // as logits.hpp says
    return sum + (std::isinf(bias) ? bias : std::min(std::max(bias, -most), most));
  };
  p.shown = [&a, s](int m, long, long h, long i, long j) {
    const logit_rules<R>& r = rules_of(a, m);
    const index_t query = s.first_query + i, key = s.first_key + j;
    if (r.visible.data && *r.visible.at(s.b, h, query, key) == 0) return false;
    if (r.predicate.sees && !r.predicate.sees(r.predicate.context, s.b, h, query, key)) return false;
    if (!r.blocks.begins) return true;
    const index_t* const row = r.blocks.row(s.b, h, query);
    return std::find(r.blocks.keys + row[0], r.blocks.keys + row[1], key / r.blocks.key_block) != r.blocks.keys + row[1];
  };
  p.kind = a.norm.kind == diffattn::norm_kind::none  ? reference::norm::none
           : a.norm.kind == diffattn::norm_kind::rms ? reference::norm::rms
                                                     : reference::norm::group;
  p.eps = double(a.norm.eps), p.gain = double(a.norm.gain);
  if (a.norm.weight) p.weight.assign(a.norm.weight, a.norm.weight + a.out.width);
  if (a.norm.bias) p.bias.assign(a.norm.bias, a.norm.bias + a.out.width);
}

/// All outputs of a call, [batch][query][head][channel]; empty if not asked for.
struct results {
  std::vector<double> out, raw[2], lse[2];
};

template <class T>
results results_of(const forward_args<T>& a) {
  results r;
  for_each(a.out, [&](T x) { r.out.push_back(number(x)); });
  for (int m = 0; m < 2; ++m) {
    const auto& raw = m == 0 ? a.out1 : a.out2;
    const auto& lse = m == 0 ? a.lse1 : a.lse2;
    const auto to = [](std::vector<double>& v) { return [&v](auto x) { v.push_back(double(x)); }; };
    if (raw.data) for_each(raw, to(r.raw[m]));
    if (lse.data) for_each(lse, a.out, to(r.lse[m]));
  }
  return r;
}

/// What the outputs must be, and by how much they may differ.
struct expectation {
  results value, tolerance;
};

template <class T>
expectation expect(const forward_args<T>& a) {
  using R = diffattn::compute_type<T>;
  expectation e;
  const double u = double(std::numeric_limits<R>::epsilon()) / 2;
  // Weights too small for R count as 0, and sinks far above all keys (2^84 in float) leave them some weight. The norm divides
  // by √eps at most.
  const bool sinks = rules_of(a, 0).sinks || rules_of(a, 1).sinks;
  const double tiny = !sinks ? double(std::numeric_limits<R>::min()) : sizeof(R) == 4 ? 0x1p-80 : 0x1p-880;
  const double norm = a.norm.kind == diffattn::norm_kind::none ? 1 : std::min(1.0, std::sqrt(double(a.norm.eps)));
  for (const sequence_piece& s : pieces_of(a)) {
    read_problem<R> p;
    read(a, s, p);
    const reference::result r = reference::attention(p.problem);
    double largest = 0;
    for (const R x : p.v)
      if (std::isfinite(x)) largest = std::max(largest, std::fabs(double(x)));
    const auto add = [&](const reference::numbers& n, double least, std::vector<double>& value,
                         std::vector<double>& tolerance) {
      value.insert(value.end(), n.value.begin(), n.value.end());
      for (const double error : n.error) tolerance.push_back(u * error + least * double(s.keys) * (1 + largest));
    };
    add(r.out, tiny / norm, e.value.out, e.tolerance.out);
    for (std::size_t m = 0; m < 2; ++m) {
      add(r.av[m], tiny, e.value.raw[m], e.tolerance.raw[m]);
      add(r.lse[m], tiny, e.value.lse[m], e.tolerance.lse[m]);
    }
  }
  for (std::size_t i = 0; is_16_bit<T> && i < e.value.out.size(); ++i) {  // rounded once more
    double& x = e.value.out[i];
    e.tolerance.out[i] += 1.01 * epsilon<T>() / 2 * std::fabs(x) + 0x1p-25;
    if (std::is_same_v<T, diffattn::f16> && std::fabs(x) > 65504) x = std::copysign(INFINITY, x);
  }
  return e;
}

template <class T>
axes shape_of(const tensor_view<T>& t, bool rows = false) {
  axes a{{{"batch", t.batch}, {"row", t.tokens}, {"head", t.heads}}};
  if (!rows) a.sizes.push_back({"channel", t.width});
  return a;
}

/// Those outputs that `actual` has, compared by f(actual, index among values, shape, name).
template <class T, class F>
testing::AssertionResult for_each_output(const forward_args<T>& a, const results& actual, F&& f) {
  testing::AssertionResult r = f(
      [](const auto& x) -> auto& { return x.out; }, shape_of(a.out));
  if (!r) return r << " (out)";
  for (int m = 0; m < 2; ++m) {
    if (!actual.raw[m].empty())
      if (!(r = f(
                [m](const auto& x) -> auto& { return x.raw[m]; }, shape_of(a.out))))
        return r << " (out" << m + 1 << ")";
    if (!actual.lse[m].empty())
      if (!(r = f(
                [m](const auto& x) -> auto& { return x.lse[m]; }, shape_of(a.out, true))))
        return r << " (lse" << m + 1 << ")";
  }
  return r;
}

template <class T>
testing::AssertionResult near(const forward_args<T>& a, const results& actual, const expectation& e) {
  return for_each_output(
      a, actual, [&](auto get, const axes& where) { return compare(get(actual), get(e.value), get(e.tolerance), where); });
}
template <class T>
testing::AssertionResult same(const forward_args<T>& a, const results& actual, const results& expected) {
  return for_each_output(a, actual, [&](auto get, const axes& where) { return identical(get(actual), get(expected), where); });
}

// ---------------------------------------------------------------------------------------------- any call

/// A mask that a formula tells: stripes and patches, so that tiles of every kind occur.
struct formula_mask {
  index_t queries = 1, keys = 1, seed = 0;

  static bool sees(const void* self, index_t b, index_t h, index_t i, index_t j) {
    const formula_mask& m = *static_cast<const formula_mask*>(self);
    const std::uint64_t place = static_cast<std::uint64_t>(((b * 7 + h) * 131 + i / m.queries) * 137 + j / m.keys + m.seed);
    return (place * 0x9E3779B97F4A7C15u >> 40) % 3 != 0;
  }
  static diffattn::sight tile(const void* self, index_t b, index_t h, index_t first, index_t last, diffattn::key_range keys) {
    bool some = false, all = true;
    for (index_t i = first; i <= last; ++i)
      for (index_t j = keys.begin; j < keys.end; ++j) sees(self, b, h, i, j) ? void(some = true) : void(all = false);
    return all ? diffattn::sight::all : some ? diffattn::sight::some : diffattn::sight::none;
  }
};

/// A call that `check` accepts, on tensors, with all that it points to.
template <class T>
class any_call {
 public:
  using R = diffattn::compute_type<T>;

  /// `work`: multiplications, about.
  any_call(choices& c, index_t work) : random_(static_cast<std::uint64_t>(c.integer(0, 255))) {
    choose_shape(c, work);
    choose_coefficients(c);
    choose_mask(c);
    choose_rules(c, rules_[0]);
    args.logits = rules_[0];
    if (c.one_in(3)) choose_rules(c, rules_[1]), args.logits_2 = &rules_[1];
    args.schedule =
        c.pick({diffattn::schedule_choice::panels, diffattn::schedule_choice::stream, diffattn::schedule_choice::automatic});
    if (c.one_in(4)) poison(c.pick<double>({NAN, INFINITY, -INFINITY}));
  }
  any_call(const any_call&) = delete;
  any_call& operator=(const any_call&) = delete;

  /// Outputs in new memory.
  void place_outputs(choices& c, bool optional) {
    const index_t batch = args.q.batch, tokens = args.q.tokens, heads = args.heads.heads;
    args.out = place_tensor<T>(c, memory, batch, tokens, heads, width_, element<T>(-77));
    if (!optional) return;
    for (tensor_view<R>* raw : {&args.out1, &args.out2})
      if (c.coin()) *raw = place_tensor<R>(c, memory, batch, tokens, heads, width_, R(-77));
    for (token_head_view<R>* lse : {&args.lse1, &args.lse2})
      if (c.coin()) *lse = place_rows<R>(c, memory, batch, tokens, heads, R(-77));
  }

  forward_args<T> args;
  bool lambda_is_gate = false, alpha_is_gate = false;
  owned_arrays memory;

  std::string text() const {
    std::ostringstream s;
    const auto& m = args.mask;
    s << name(diffattn::storage_of<T>) << " batch " << args.q.batch << " q_len " << args.q.tokens << " kv_len " << args.k.tokens
      << " d " << args.q.width << " dv " << args.out.width << " heads " << args.heads.heads << " " << family_ << " schedule "
      << static_cast<int>(args.schedule) << " norm " << static_cast<int>(args.norm.kind) << (m.causal ? " causal" : "");
    if (m.offset != m.align_to_end) s << " offset " << m.offset;
    if (m.window != m.unlimited) s << " window " << m.window;
    s << (m.key_ranges ? " ranges" : "") << (m.prefixes ? " prefixes" : "") << (m.query_starts ? " packed" : "");
    for (int map = 0; map < (args.logits_2 ? 2 : 1); ++map) {
      const logit_rules<R>& r = rules_[map];
      s << " |" << (r.soft_cap != 0 ? " cap" : "") << (r.slopes ? " slopes" : "") << (r.bias.data ? " bias" : "")
        << (r.visible.data ? " visible" : "") << (r.blocks.begins ? " blocks" : "") << (r.predicate.sees ? " predicate" : "")
        << (r.sinks ? " sinks" : "");
    }
    return s.str();
  }

 private:
  void choose_shape(choices& c, index_t work) {
    const family f = all_families[c.integer(0, static_cast<index_t>(std::size(all_families)) - 1)];
    family_ = name(f);
    const index_t ratio = c.integer(1, 3), groups = c.integer(1, 2);
    index_t kv = c.integer(1, 2);
    const index_t heads = kv * ratio * groups;
    if (f == family::table) kv = heads;
    const head_choice h = choose_heads(f, heads, kv, ratio, table_);
    args.heads = h.map;
    if (f == family::table) args.heads.entries = memory.keep(table_);
    const index_t batch = c.one_in(32) ? 0 : c.pick<index_t>({1, 1, 2, 3});
    index_t q_len = c.pick<index_t>({1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 65, 130});
    index_t kv_len =
        c.pick<index_t>({1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 161, 257, 1023, 1030, 2050});
    if (c.one_in(32)) q_len = 0;
    if (c.one_in(32)) kv_len = 0;
    const index_t d = c.pick<index_t>({1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 32, 33, 64, 65});
    const index_t width = c.pick<index_t>({1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 32, 33, 64, 65});
    while (batch * heads * q_len * kv_len * (2 * d + width) > work) (q_len > 40 || kv_len < 8 ? q_len : kv_len) /= 2;
    width_ = h.two_values ? 2 * width : width;
    const double q_size = c.pick<double>({1, 1, 8, 0.01}), v_size = c.pick<double>({1, 1, 100, 1e-6});
    const auto input = [&](index_t tokens, index_t n, index_t w, double size) {
      const unsigned shared = c.one_in(8) ? 1u << 2 * c.integer(0, 1) : 0;  // one head or one batch entry for all
      const tensor_view<T> t = place_tensor(c, memory, batch, tokens, n, w, element<T>(NAN), shared);
      for_each(t, [&](T& x) { x = element<T>(size * random_.normal()); });
      return t;
    };
    args.q = input(q_len, h.q_heads, d, q_size);
    args.k = k_ = input(kv_len, h.k_heads, d, 1);
    args.v = v_ = input(kv_len, h.v_heads, width, v_size);
    place_outputs(c, true);
    if (c.coin()) args.scale = c.pick<R>({R(0.5), R(-0.25), R(1e-3), R(3)});
  }

  void choose_coefficients(choices& c) {
    const auto coefficient = [&](bool& is_gate) -> diffattn::lambda_view<R> {
      const index_t batch = args.q.batch, tokens = args.q.tokens, heads = args.heads.heads;
      const auto numbers = [&](index_t n) { return memory.keep(normal_vector<R>(n, random_)); };
      is_gate = false;
      switch (c.integer(0, 5)) {
        case 0: return c.pick<R>({R(0.7), R(1), R(0), R(-0.5), R(3)});
        case 1: return diffattn::lambda_view<R>::per_head(numbers(heads));
        case 2: return diffattn::lambda_view<R>::per_token(numbers(batch * tokens * heads), tokens, heads);
        case 3: is_gate = true; return diffattn::lambda_view<R>::gate(numbers(batch * tokens * heads), tokens, heads);
        default: break;
      }
      is_gate = c.coin();
      const unsigned shared = static_cast<unsigned>(c.integer(0, 7));
      const token_head_view<R> t = place_rows<R>(c, memory, batch, tokens, heads, std::numeric_limits<R>::quiet_NaN(), shared);
      for_each(t, args.out, [&](R& x) { x = static_cast<R>(random_.normal()); });
      return diffattn::lambda_view<R>::strided({t.data, t.batch_stride, t.token_stride, t.head_stride}, is_gate);
    };
    args.lambda = coefficient(lambda_is_gate);
    if (c.coin()) args.alpha = coefficient(alpha_is_gate);
    auto& n = args.norm;
    n.kind = c.pick({diffattn::norm_kind::none, diffattn::norm_kind::rms, diffattn::norm_kind::group});
    if (c.coin()) n.weight = memory.keep(normal_vector<R>(width_, random_));
    if (n.kind == diffattn::norm_kind::group && c.coin()) n.bias = memory.keep(normal_vector<R>(width_, random_));
    if (c.coin()) n.gain = R(0.64), n.eps = R(1e-3);
  }

  void choose_mask(choices& c) {
    diffattn::attention_mask& m = args.mask;
    const index_t kv_len = args.k.tokens;
    m.causal = c.coin();
    if (c.one_in(3)) m.offset = c.integer(-5, kv_len + 5);
    if (m.causal && c.one_in(3)) m.window = c.pick<index_t>({1, 2, 3, 8, 16, 33, 128});
    const index_t entries = args.q.batch == 1 && c.one_in(4) ? pack(c) : args.q.batch;
    if (!m.query_starts && c.one_in(4)) {
      std::vector<diffattn::key_range> ranges;
      for (index_t b = 0; b < entries; ++b) {
        const index_t begin = random_.integer(0, kv_len);
        ranges.push_back({begin, random_.integer(begin, kv_len)});
      }
      m.key_ranges = memory.keep(std::move(ranges));
    }
    if (m.causal && c.one_in(4)) {
      std::vector<index_t> prefixes;
      for (index_t e = 0; e < entries; ++e)
        prefixes.push_back(random_.integer(0, m.query_starts ? m.key_starts[e + 1] - m.key_starts[e] : kv_len));
      m.prefixes = memory.keep(std::move(prefixes));
    }
  }
  /// Packs sequences into the one batch entry; how many.
  index_t pack(choices& c) {
    const index_t n = c.integer(1, 4);
    const auto starts = [&](index_t first, index_t last) {
      std::vector<std::int32_t> s{static_cast<std::int32_t>(first)};
      for (index_t i = 1; i < n; ++i) s.push_back(static_cast<std::int32_t>(random_.integer(first, last)));
      s.push_back(static_cast<std::int32_t>(last));
      std::sort(s.begin(), s.end());
      return memory.keep(std::move(s));
    };
    const index_t first = c.one_in(4) ? random_.integer(0, args.k.tokens) : 0;
    args.mask.sequences = n;
    args.mask.query_starts = starts(0, args.q.tokens);
    args.mask.key_starts = starts(first, random_.integer(c.coin() ? first : args.k.tokens, args.k.tokens));
    return n;
  }

  void choose_rules(choices& c, logit_rules<R>& r) {
    const index_t which = c.integer(0, 255);
    if (which == 0) return;
    const std::vector<index_t> sizes = {args.q.batch, args.heads.heads, args.q.tokens, args.k.tokens};
    const index_t hidden = c.pick<index_t>({4, 1, 9, 10});  // tenths of the keys that each rule hides
    const auto hides = [&] { return random_.integer(0, 9) < hidden; };
    const auto array = [&](auto fill, auto&& make) {
      const placed p = place(c, sizes, 1, static_cast<unsigned>(c.integer(0, 15)));
      std::vector<decltype(fill)> numbers(static_cast<std::size_t>(p.size), fill);
      for (auto& x : numbers) x = make();
      return diffattn::logit_view<decltype(fill)>{memory.keep(std::move(numbers)) + p.origin, p.strides[0], p.strides[1],
                                                  p.strides[2], p.strides[3]};
    };
    const auto per_head = [&](auto&& make) {
      std::vector<R> numbers;
      for (index_t h = 0; h < args.heads.heads; ++h) numbers.push_back(make());
      return memory.keep(std::move(numbers));
    };
    // Multiples of powers of two, so that sums of them are exact in any order.
    if (which & 1) r.soft_cap = c.pick<R>({R(2.5), R(30), R(0.5)});
    if (which & 2) r.slopes = per_head([&] { return static_cast<R>(random_.integer(-4, 16)) / 64; });
    if (which & 4) {
      const bool finite = c.one_in(4);
      r.bias = array(R(0), [&] {
        return !hides() ? static_cast<R>(random_.integer(-256, 256)) / 64
               : finite ? R(-65536)
                        : -std::numeric_limits<R>::infinity();
      });
    }
    if (which & 8)
      r.visible = array(static_cast<unsigned char>(0),
                        [&] { return static_cast<unsigned char>(hides() ? 0 : random_.integer(1, 255)); });
    if (which & 16) choose_blocks(c, r.blocks, hides);
    if (which & 32) {
      r.predicate.context = memory.keep_one(formula_mask{c.integer(1, 40), c.integer(1, 70), c.integer(0, 255)});
      r.predicate.sees = formula_mask::sees;
      if (c.coin()) r.predicate.tile = formula_mask::tile;
    }
    if (which & 64)
      r.sinks = per_head([&] {
        return random_.integer(0, 4) == 0 ? -std::numeric_limits<R>::infinity()
                                          : static_cast<R>(random_.integer(-256, 512)) / 64;
      });
  }
  template <class F>
  void choose_blocks(choices& c, diffattn::block_list& l, F&& hides) {
    l.query_block = c.integer(1, 40), l.key_block = c.integer(1, 70);
    const index_t rows = (args.q.tokens + l.query_block - 1) / l.query_block;
    const index_t columns = (args.k.tokens + l.key_block - 1) / l.key_block;
    const bool per_batch = c.coin() || args.q.batch == 0, per_head = c.coin();
    const index_t batch = per_batch ? args.q.batch : 1, heads = per_head ? args.heads.heads : 1;
    std::vector<index_t> begins, keys;
    for (index_t list = 0; list < batch * heads; ++list) {
      for (index_t r = 0; r < rows; ++r) {
        begins.push_back(static_cast<index_t>(keys.size()));
        for (index_t k = 0; k < columns; ++k)
          if (!hides()) keys.push_back(k);
      }
      begins.push_back(static_cast<index_t>(keys.size()));
    }
    l.begins = memory.keep(std::move(begins)), l.keys = memory.keep(std::move(keys));
    l.batch_stride = per_batch ? heads * (rows + 1) : 0, l.head_stride = per_head ? rows + 1 : 0;
  }

  /// Keys and values that nobody sees become x.
  void poison(double x) {
    const index_t batch = args.k.batch, n = args.k.tokens;
    std::vector<char> seen(static_cast<std::size_t>(batch * n));
    for (const sequence_piece& s : pieces_of(args)) {
      read_problem<R> p;
      read(args, s, p);
      const auto somebody_sees = [&](index_t j) {
        for (index_t i = 0; i < s.queries; ++i)
          for (index_t h = 0; h < args.heads.heads; ++h)
            if (p.sees(0, h, i, j) || p.sees(1, h, i, j)) return true;
        return false;
      };
      for (index_t j = 0; j < s.keys; ++j) {
        if (!somebody_sees(j)) continue;
        for (index_t b = 0; b < batch; ++b)  // entries may share their memory
          if (b == s.b || k_.batch_stride == 0 || v_.batch_stride == 0)
            seen[static_cast<std::size_t>(b * n + s.first_key + j)] = 1;
      }
    }
    for (const tensor_view<T>* t : {&k_, &v_})
      for (index_t b = 0; b < batch; ++b)
        for (index_t j = 0; j < n; ++j)
          for (index_t h = 0; h < t->heads; ++h)
            if (!seen[static_cast<std::size_t>(b * n + j)]) std::fill_n(t->at(b, j, h), t->width, element<T>(x));
  }

  random_source random_;
  std::string family_;
  index_t width_ = 0;
  std::vector<diffattn::head_indices> table_;
  tensor_view<T> k_, v_;
  logit_rules<R> rules_[2];
};

/// Keys and values of a call in a cache, sequence sequences[b] for entry b. Not for packed sequences.
template <class T>
struct call_from_cache {
  call_from_cache(choices& c, const forward_args<T>& a, const cache_choice& kind, storage keys, storage values)
      : cache(config(a, kind, keys, values)), args(a) {
    for (index_t b = 0; b < a.q.batch; ++b) sequences.push_back(a.q.batch - b);
    sequences.reserve(1);
    cache.append_in_turns(sequences, a.k, a.v);
    const index_t forgotten = c.coin() ? first_seen(a) : 0;  // what no row sees may be
    for (const index_t s : sequences) EXPECT_EQ(cache->discard(s, forgotten), diffattn::status::ok);
    args.k = args.v = {}, args.cache = cache->view(), args.sequences = sequences.data();
  }
  call_from_cache(const call_from_cache&) = delete;
  call_from_cache& operator=(const call_from_cache&) = delete;

  static index_t first_seen(const forward_args<T>& a) {
    index_t first = a.k.tokens;
    for (index_t b = 0; b < a.q.batch && a.q.tokens > 0; ++b)
      first = std::min(first, visible_keys(a.mask, a.q.tokens, a.k.tokens, b, 0).begin);
    return first;
  }
  /// A ring has no more room than the call needs.
  static diffattn::kv_cache_config config(const forward_args<T>& a, const cache_choice& kind, storage keys, storage values) {
    diffattn::kv_cache_config c;
    c.heads = a.heads, c.key_width = a.k.width, c.value_width = a.v.width, c.keys = keys, c.values = values;
    c.kind = kind.kind, c.page_tokens = kind.page_tokens, c.sequences = a.q.batch + 1;
    c.capacity = std::max(a.k.tokens - (kind.kind == kv_cache_kind::ring ? first_seen(a) : 0), index_t{1});
    return c;
  }

  owned_cache cache;
  std::vector<index_t> sequences;
  forward_args<T> args;
};

/// f(T()) for an element type T.
template <class F>
auto with_any_type(choices& c, F&& f) {
  switch (c.integer(0, 3)) {
    case 0: return f(0.0f);
    case 1: return f(0.0);
    case 2: return f(diffattn::f16{});
    default: return f(diffattn::bf16{});
  }
}

}  // namespace test
