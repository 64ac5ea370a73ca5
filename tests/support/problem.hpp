// SPDX-License-Identifier: MIT
#pragma once

// One call of the library with everything it needs: random inputs, outputs in guarded memory, the same call from caches, and
// the same call for the reference.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <diffattn/arguments.hpp>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "../reference/reference.hpp"
#include "calls.hpp"
#include "compare.hpp"
#include "families.hpp"
#include "guarded.hpp"
#include "random.hpp"
#include "ways.hpp"

namespace test {

using diffattn::index_t;
/// A tensor with gaps between its rows. Inputs have NaN in the gaps: who reads there finds out. Outputs have a number there
/// that must survive the call.
template <class T>
class tensor {
 public:
  static constexpr T untouched = T(-1234.5);
  tensor() = default;
  tensor(index_t batch, index_t tokens, index_t heads, index_t width, diffattn::layout order, index_t gap, bool one_head,
         T fill)
      : margin_(gap > 0 && !guarded ? 64 + gap : 0) {
    const index_t stored = one_head ? 1 : heads, row = width + gap;
    view_.batch = batch, view_.tokens = tokens, view_.heads = heads, view_.width = width;
    if (order == diffattn::layout::bthd)
      view_.head_stride = row, view_.token_stride = stored * row + gap, view_.batch_stride = tokens * view_.token_stride + gap;
    else
      view_.token_stride = row, view_.head_stride = tokens * row + gap, view_.batch_stride = stored * view_.head_stride + gap;
    if (one_head) view_.head_stride = 0;
    index_t size = batch * view_.batch_stride + 2 * margin_ + 1;
    if (guarded)  // from the first element to the last one
      size = batch * tokens * heads * width == 0 ? 0
                                                 : (batch - 1) * view_.batch_stride + (tokens - 1) * view_.token_stride +
                                                       (heads - 1) * view_.head_stride + width;
    memory_.assign(static_cast<std::size_t>(size), fill);
    view_.data = memory_.data() + margin_;
    fill_ = fill;
  }
  tensor(tensor&&) = default;
  tensor& operator=(tensor&&) = default;

  const diffattn::tensor_view<T>& view() const { return view_; }
  T& at(index_t b, index_t t, index_t h, index_t c) const { return view_.at(b, t, h)[c]; }

  template <class F>
  void for_each(F&& f) const {
    for (index_t b = 0; b < view_.batch; ++b)
      for (index_t t = 0; t < view_.tokens; ++t)
        for (index_t h = 0; h < view_.heads; ++h)
          for (index_t c = 0; c < view_.width; ++c) f(at(b, t, h, c));
  }
  /// All elements, [batch][tokens][heads][width].
  std::vector<T> values() const {
    std::vector<T> v;
    for_each([&v](T x) { v.push_back(x); });
    return v;
  }
  /// Has nothing but the elements been written? Destroys them.
  bool gaps_untouched() {
    for_each([this](T& x) { x = fill_; });
    return std::all_of(memory_.begin(), memory_.end(), [this](T x) { return x == fill_; });
  }

 private:
  std::vector<T> memory_;
  diffattn::tensor_view<T> view_;
  index_t margin_ = 0;
  T fill_{};
};

enum class coefficient { number, per_head, per_token, gate };

/// What to try. Every field has the plainest value.
struct spec {
  index_t batch = 1, q_len = 8, kv_len = 8, d = 8, width = 8;  ///< width of one value head
  family heads_family = family::interleaved;
  index_t heads = 1, kv = 1, ratio = 1;
  diffattn::layout q_order = diffattn::layout::bthd, kv_order = diffattn::layout::bthd, out_order = diffattn::layout::bthd;
  index_t gap = 1;
  bool one_kv_head = false;  ///< all key (value) heads are one in memory, by stride 0
  bool causal = false;
  index_t offset = diffattn::attention_mask::align_to_end;
  index_t window = diffattn::attention_mask::unlimited;
  bool ranges = false;
  coefficient lambda = coefficient::number, alpha = coefficient::number;
  double lambda_value = 0.7, alpha_value = 1;
  diffattn::norm_kind norm = diffattn::norm_kind::none;
  bool weight = false, bias = false;
  double gain = 1, eps = 1e-5;
  bool lse = true, raw = true;
  double scale = 0;
  double q_amplitude = 1, v_amplitude = 1;
  std::uint64_t seed = 1;

  std::string text() const {
    std::string s = "batch " + std::to_string(batch) + ", q_len " + std::to_string(q_len) + ", kv_len " +
                    std::to_string(kv_len) + ", d " + std::to_string(d) + ", width " + std::to_string(width) + ", " +
                    name(heads_family) + " heads " + std::to_string(heads) + " kv " + std::to_string(kv) + " ratio " +
                    std::to_string(ratio) + ", seed " + std::to_string(seed);
    if (causal) s += ", causal";
    if (offset != diffattn::attention_mask::align_to_end) s += ", offset " + std::to_string(offset);
    if (window != diffattn::attention_mask::unlimited) s += ", window " + std::to_string(window);
    if (ranges) s += ", ranges";
    if (one_kv_head) s += ", one kv head";
    s += ", lambda kind " + std::to_string(static_cast<int>(lambda)) + ", alpha kind " +
         std::to_string(static_cast<int>(alpha)) + ", norm " + std::to_string(static_cast<int>(norm)) +
         (weight ? ", weight" : "") + (bias ? ", bias" : "");
    return s;
  }
};

template <class T>
class problem {
 public:
  explicit problem(const spec& s) : spec_(s), random_(s.seed) {
    choice_ = choose_heads(s.heads_family, s.heads, s.kv, s.ratio, table_);
    const T nan = std::numeric_limits<T>::quiet_NaN();
    const index_t dv = choice_.two_values ? 2 * s.width : s.width;
    q = tensor<T>(s.batch, s.q_len, choice_.q_heads, s.d, s.q_order, s.gap, false, nan);
    k = tensor<T>(s.batch, s.kv_len, choice_.k_heads, s.d, s.kv_order, s.gap, s.one_kv_head, nan);
    v = tensor<T>(s.batch, s.kv_len, choice_.v_heads, s.width, s.kv_order, s.gap, s.one_kv_head, nan);
    q.for_each([&](T& x) { x = static_cast<T>(s.q_amplitude * random_.normal()); });
    k.for_each([&](T& x) { x = static_cast<T>(random_.normal()); });
    v.for_each([&](T& x) { x = static_cast<T>(s.v_amplitude * random_.normal()); });
    const auto output = [&](index_t width) {
      return tensor<T>(s.batch, s.q_len, s.heads, width, s.out_order, s.gap, false, tensor<T>::untouched);
    };
    out = output(dv), out1 = output(dv), out2 = output(dv), lse1 = output(1), lse2 = output(1);
    make_coefficient(s.lambda, s.lambda_value, lambda_, args_.lambda);
    make_coefficient(s.alpha, s.alpha_value, alpha_, args_.alpha);
    args_.q = q.view(), args_.k = k.view(), args_.v = v.view(), args_.out = out.view();
    args_.heads = choice_.map;
    args_.norm.kind = s.norm, args_.norm.gain = static_cast<T>(s.gain), args_.norm.eps = static_cast<T>(s.eps);
    if (s.weight) weight_ = normal_vector<T>(dv, random_), args_.norm.weight = weight_.data();
    if (s.bias) bias_ = normal_vector<T>(dv, random_), args_.norm.bias = bias_.data();
    args_.mask.causal = s.causal, args_.mask.offset = s.offset, args_.mask.window = s.window;
    if (s.ranges) {
      for (index_t b = 0; b < s.batch; ++b) {
        const index_t begin = random_.integer(0, s.kv_len), end = random_.integer(begin, s.kv_len);
        ranges_.push_back({begin, end});
      }
      args_.mask.key_ranges = ranges_.data();
    }
    args_.scale = static_cast<T>(s.scale);
    if (s.raw) args_.out1 = out1.view(), args_.out2 = out2.view();
    if (s.lse) args_.lse1 = per_row(lse1), args_.lse2 = per_row(lse2);
  }

  diffattn::forward_args<T>& args() { return args_; }
  std::vector<diffattn::key_range>& ranges() { return ranges_; }
  /// The coefficients that arrays hold; [0] for a number.
  std::vector<T>& lambdas() { return lambda_; }
  axes shape() const {
    return {{{"batch", spec_.batch}, {"row", spec_.q_len}, {"head", spec_.heads}, {"channel", out.view().width}}};
  }
  axes row_shape() const { return {{{"batch", spec_.batch}, {"row", spec_.q_len}, {"head", spec_.heads}}}; }

  reference::problem<T> for_reference() const {
    reference::problem<T> p;
    const spec& s = spec_;
    p.batch = s.batch, p.q_len = s.q_len, p.kv_len = s.kv_len, p.d = s.d, p.dv = out.view().width;
    const auto strides = [](const diffattn::tensor_view<T>& t) {
      return reference::tensor<T>{t.data, t.batch_stride, t.token_stride, t.head_stride};
    };
    p.q = strides(q.view()), p.k = strides(k.view()), p.v = strides(v.view());
    for (const diffattn::head_indices& h : choice_.heads)
      p.heads.push_back({{h.query_1, h.query_2}, {h.key_1, h.key_2}, h.value_1, h.value_2});
    p.factor[0] = reference_coefficient(s.alpha, alpha_), p.factor[1] = reference_coefficient(s.lambda, lambda_);
    p.scale = args_.scale == T(0) ? 1 / std::sqrt(double(s.d)) : double(args_.scale);
    p.causal = args_.mask.causal;
    p.offset = args_.mask.offset == diffattn::attention_mask::align_to_end ? s.kv_len - s.q_len : args_.mask.offset;
    p.window = args_.mask.window == diffattn::attention_mask::unlimited ? 0 : args_.mask.window;
    for (const diffattn::key_range& r : ranges_) p.first.push_back(r.begin), p.last.push_back(r.end);
    p.kind = args_.norm.kind == diffattn::norm_kind::none  ? reference::norm::none
             : args_.norm.kind == diffattn::norm_kind::rms ? reference::norm::rms
                                                           : reference::norm::group;
    p.eps = double(args_.norm.eps), p.gain = double(args_.norm.gain);
    p.weight.assign(weight_.begin(), weight_.end()), p.bias.assign(bias_.begin(), bias_.end());
    return p;
  }

  /// All outputs of the last call.
  struct results {
    std::vector<T> out, raw[2], lse[2];
  };
  results outputs() const { return {out.values(), {out1.values(), out2.values()}, {lse1.values(), lse2.values()}}; }
  void expect_identical(const results& a, const results& b) const {
    EXPECT_TRUE(identical(a.out, b.out, shape())) << "out";
    for (int m = 0; m < 2; ++m) {
      EXPECT_TRUE(identical(a.raw[m], b.raw[m], shape())) << "out" << m + 1;
      EXPECT_TRUE(identical(a.lse[m], b.lse[m], row_shape())) << "lse" << m + 1;
    }
  }
  void expect_near(const results& actual, const reference::result& r) const {
    EXPECT_TRUE(compare(actual.out, r.out.value, tolerance(r.out), shape())) << "out";
    for (std::size_t m = 0; m < 2; ++m) {
      if (spec_.raw) {
        EXPECT_TRUE(compare(actual.raw[m], r.av[m].value, tolerance(r.av[m]), shape())) << "out" << m + 1;
      }
      if (spec_.lse) {
        EXPECT_TRUE(compare(actual.lse[m], r.lse[m].value, tolerance(r.lse[m]), row_shape())) << "lse" << m + 1;
      }
    }
  }

  /// Runs the reference and the library by both schedules, and compares all that was asked for; then from caches, which must
  /// not change a bit.
  void verify() { verify(reference::attention(for_reference())); }
  void verify(const reference::result& r) {
    SCOPED_TRACE(spec_.text());
    for (const schedule_choice schedule : both_schedules) {
      SCOPED_TRACE(name(schedule));
      args_.schedule = schedule;
      ASSERT_EQ(run(args_), diffattn::status::ok);
      const results plain = outputs();
      expect_near(plain, r);
      for (tensor<T>* t : {&out, &out1, &out2, &lse1, &lse2}) EXPECT_TRUE(t->gaps_untouched()) << "written outside an output";
      int place = static_cast<int>(schedule);
      for (const cache_choice& c : all_caches)
        if (is_small() || static_cast<std::uint64_t>(place++) % std::size(all_caches) == spec_.seed % std::size(all_caches))
          verify_cached(c, plain);
    }
  }

  /// What a cache must be for this call. A ring has room for no more than what is seen.
  diffattn::kv_cache_config cache_config(const cache_choice& choice) const {
    const index_t held = choice.kind == kv_cache_kind::ring ? spec_.kv_len - first_seen() : spec_.kv_len;
    diffattn::kv_cache_config c;
    c.heads = args_.heads, c.key_width = spec_.d, c.value_width = spec_.width;
    c.keys = c.values = diffattn::storage_of<T>;
    c.kind = choice.kind, c.sequences = spec_.batch + 1;
    c.capacity = std::max(held, index_t{1}), c.page_tokens = choice.page_tokens;
    return c;
  }

  /// The call with keys and values in a cache, sequence sequences[b] for entry b.
  diffattn::forward_args<T> cached(owned_cache& from, const std::vector<index_t>& sequences) const {
    diffattn::forward_args<T> a = args_;
    a.k = a.v = {}, a.cache = from->view(), a.sequences = sequences.data();
    return a;
  }

  void verify_cached(const cache_choice& choice, const results& plain) {
    SCOPED_TRACE(choice.text());
    std::vector<index_t> sequences;
    for (index_t b = 0; b < spec_.batch; ++b) sequences.push_back(spec_.batch - b);
    sequences.reserve(1);  // not null, even if there are none
    owned_cache cache(cache_config(choice));
    cache.append_in_turns(sequences, k.view(), v.view());
    if (choice.kind == kv_cache_kind::paged) {  // what no row sees may be given back
      for (const index_t s : sequences) EXPECT_EQ(cache->discard(s, first_seen()), diffattn::status::ok);
    }
    const std::vector<unsigned char> before = cache.memory();
    const diffattn::status s = run(cached(cache, sequences));
    ASSERT_EQ(s, diffattn::status::ok) << message(s);
    expect_identical(outputs(), plain);
    EXPECT_TRUE(cache.memory() == before) << "written to the cache";
  }

  /// The first key that some row of some entry sees; kv_len if none.
  index_t first_seen() const {
    const reference::problem<T> p = for_reference();
    for (index_t j = 0; j < spec_.kv_len; ++j)
      for (index_t b = 0; b < spec_.batch; ++b)
        for (index_t i = 0; i < spec_.q_len; ++i)
          if (p.allowed(b, i, j)) return j;
    return spec_.kv_len;
  }

  /// The reference's bound for T, and room for weights too small for T: they count as 0.
  std::vector<double> tolerance(const reference::numbers& n) const {
    const double u = double(std::numeric_limits<T>::epsilon()) / 2, tiny = double(std::numeric_limits<T>::min());
    std::vector<double> t;
    for (const double e : n.error) t.push_back(u * e + tiny * double(spec_.kv_len) * (1 + spec_.v_amplitude));
    return t;
  }

  tensor<T> q, k, v, out, out1, out2, lse1, lse2;

 private:
  static diffattn::token_head_view<T> per_row(const tensor<T>& t) {
    const diffattn::tensor_view<T>& v = t.view();
    return {v.data, v.batch_stride, v.token_stride, v.head_stride};
  }
  /// Small enough to be run from every kind of cache.
  bool is_small() const {
    return spec_.batch * spec_.heads * spec_.q_len * spec_.kv_len * (2 * spec_.d + spec_.width) <= 30'000;
  }
  void make_coefficient(coefficient kind, double value, std::vector<T>& memory, diffattn::lambda_view<T>& view) {
    if (kind == coefficient::number) {
      memory.assign(1, static_cast<T>(value));
      view = memory[0];
      return;
    }
    const bool one_row = kind == coefficient::per_head;
    memory = normal_vector<T>(one_row ? spec_.heads : spec_.batch * spec_.q_len * spec_.heads, random_);
    view = one_row                          ? diffattn::lambda_view<T>::per_head(memory.data())
           : kind == coefficient::per_token ? diffattn::lambda_view<T>::per_token(memory.data(), spec_.q_len, spec_.heads)
                                            : diffattn::lambda_view<T>::gate(memory.data(), spec_.q_len, spec_.heads);
  }
  std::vector<double> reference_coefficient(coefficient kind, const std::vector<T>& memory) const {
    std::vector<double> f;
    for (index_t row = 0; row < spec_.batch * spec_.q_len; ++row)
      for (index_t h = 0; h < spec_.heads; ++h) {
        const double x = double(memory[static_cast<std::size_t>(kind == coefficient::number     ? 0
                                                                : kind == coefficient::per_head ? h
                                                                                                : row * spec_.heads + h)]);
        f.push_back(kind == coefficient::gate ? 1 / (1 + std::exp(-x)) : x);
      }
    return f;
  }

  spec spec_;
  random_source random_;
  std::vector<diffattn::head_indices> table_;
  head_choice choice_;
  std::vector<T> lambda_, alpha_, weight_, bias_;
  std::vector<diffattn::key_range> ranges_;
  diffattn::forward_args<T> args_;
};

}  // namespace test
