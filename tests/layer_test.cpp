// SPDX-License-Identifier: MIT
// Whole layers of every family against the naive layer in double: in one call, through caches, on borrowed keys, by any
// executor; and what a wrong call is told.

#define EIGEN_USE_THREADS

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <diffattn/executor/eigen_thread_pool.hpp>
#include <diffattn/models/axolotl.hpp>
#include <diffattn/models/layer.hpp>
#include <diffattn/models/llama.hpp>
#include <diffattn/models/motif.hpp>
#include <diffattn/models/phi4flash.hpp>
#include <diffattn/models/unilm.hpp>
#include <diffattn/models/vision.hpp>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "reference/layer.hpp"
#include "support/cache.hpp"
#include "support/calls.hpp"
#include "support/compare.hpp"
#include "support/families.hpp"
#include "support/random.hpp"

namespace {

using diffattn::attention_mask;
using diffattn::head_map;
using diffattn::index_t;
using diffattn::key_range;
using diffattn::key_source;
using diffattn::kv_cache_kind;
using diffattn::kv_view;
using diffattn::lambda_rule;
using diffattn::layer_args;
using diffattn::layer_config;
using diffattn::layer_weights;
using diffattn::linear;
using diffattn::norm_kind;
using diffattn::rope_style;
using diffattn::status;
using diffattn::storage;
using diffattn::tensor_view;
using test::any_executor;
using test::cache_choice;
using test::family;
using test::owned_cache;
using test::random_source;
namespace models = diffattn::models;

constexpr std::size_t size(index_t n) {
  return static_cast<std::size_t>(n);
}

// ---- One layer, as the library and as the reference take it ----

/// A description, and the heads that it must read.
struct model {
  std::string name;
  layer_config config;
  std::vector<diffattn::head_indices> heads;
  index_t q_heads = 0, k_heads = 0, v_heads = 0;
};

model make_model(const char* name, const layer_config& config, family f, index_t heads, index_t kv, index_t ratio = 1) {
  std::vector<diffattn::head_indices> no_table;
  const test::head_choice h = test::choose_heads(f, heads, kv, ratio, no_table);
  return {name, config, h.heads, h.q_heads, h.k_heads, h.v_heads};
}

model unilm_v1(index_t width, index_t d, index_t heads, index_t kv) {
  return make_model("unilm v1", models::unilm_v1({width, 2 * heads, 2 * kv, d}, 1), family::interleaved, heads, kv);
}
model unilm_v2(index_t width, index_t d, index_t heads, index_t kv) {
  return make_model("unilm v2", models::unilm_v2({width, 2 * heads, kv, d}), family::shared, heads, kv);
}
model llama(index_t width, index_t d, index_t heads, index_t kv) {
  model m{"llama", models::llama({width, heads, kv, d}), {}, heads, kv, kv};
  for (const long key : test::heads::repeat(test::heads::count(kv), heads / kv)) {
    const index_t h = static_cast<index_t>(m.heads.size());
    m.heads.push_back({h, h, key, key, key, -1});
  }
  return m;
}
model phi4flash(index_t width, index_t d, index_t heads, index_t kv, index_t window) {
  return make_model("phi4flash", models::phi4flash({width, 2 * heads, 2 * kv, d}, 3, window), family::interleaved_adjacent,
                    heads, kv);
}
model phi4flash_cross(index_t width, index_t d, index_t heads, index_t kv) {
  return make_model("phi4flash cross", models::phi4flash_cross({width, 2 * heads, 2 * kv, d}, 19), family::interleaved_adjacent,
                    heads, kv);
}
model motif_3(index_t width, index_t d, index_t heads, index_t ratio, index_t kv, bool gate) {
  return make_model(gate ? "motif 3, gate" : "motif 3",
                    models::motif_3({width, heads + heads / ratio, kv, d}, heads / ratio, gate), family::grouped_shared, heads,
                    kv, ratio);
}

/// Those whose keys are their own. `heads` output heads on `kv` key pairs or heads, but as many for vision models.
std::vector<model> all_models(index_t width, index_t d, index_t heads, index_t kv) {
  const diffattn::layer_shape pairs{width, 2 * heads, 2 * kv, d}, alike{width, 2 * heads, 2 * heads, d};
  models::axolotl_options split, doubled;
  split.lambda_init = 0.25, split.mix = 0.75, split.rms_norm_eps = 1e-3;
  doubled.split_heads = false, doubled.sub_norm = false;
  std::vector<model> all = {
      unilm_v1(width, d, heads, kv),
      make_model("unilm v1 naive", models::unilm_v1_naive(pairs, 0), family::interleaved_repeated, heads, kv),
      unilm_v2(width, d, heads, kv),
      llama(width, d, heads, kv),
      make_model("diffllama", models::diffllama({width, 2 * heads, kv, d}, 2, 1e-4), family::halves, heads, kv),
      phi4flash(width, d, heads, kv, 5),
      make_model("motif 2.6B", models::motif_2p6b(pairs, 0), family::interleaved_adjacent, heads, kv),
      make_model("timm, vectors", models::timm(alike, 4), family::interleaved, heads, heads),
      make_model("timm, scalars", models::timm(alike, 4, lambda_rule::scalars), family::interleaved, heads, heads),
      make_model("diffclip, image", models::diffclip(alike, false), family::interleaved, heads, heads),
      make_model("diffclip, text", models::diffclip(alike, true), family::interleaved, heads, heads),
      make_model("axolotl, split", models::axolotl(pairs, split), family::component_major, heads, kv),
      make_model("axolotl, doubled", models::axolotl(pairs, doubled), family::component_major_wide, heads, kv)};
  if (heads % 2 == 0 && heads / 2 % kv == 0) {
    all.push_back(make_model("motif 2", models::motif_2({width, heads + heads / 2, 2 * kv, d}, 1, heads / 2), family::grouped,
                             heads, kv, 2));
    for (const bool gate : {false, true}) all.push_back(motif_3(width, d, heads, 2, kv, gate));
  }
  return all;
}

struct layer_options {
  bool biases = false, norm_biases = false;
  bool norm_weights = true;  ///< of the optional ones: q, k and scale norm
  index_t rotary = 0;        ///< rotating channels; 0: all of an even number
  double gate_amplitude = 1;
  std::uint64_t seed = 1;
};

/// Random numbers for a layer.
template <class T>
class layer {
 public:
  static constexpr index_t first_position = -16, positions = 400;

  explicit layer(const model& m, const layer_options& o = {}) : config(m.config), options_(o), random_(o.seed) {
    const layer_config& c = config;
    reference::layer& r = reference;
    const index_t width = c.model_width, d = c.head_width, heads = index_t(m.heads.size());
    const index_t dv = m.heads[0].value_2 < 0 ? c.value_width : 2 * c.value_width;
    r.model_width = width, r.d = d, r.width = c.value_width;
    r.q_heads = m.q_heads, r.k_heads = m.k_heads, r.v_heads = m.v_heads;
    for (const diffattn::head_indices& h : m.heads)
      r.heads.push_back({{h.query_1, h.query_2}, {h.key_1, h.key_2}, h.value_1, h.value_2});
    r.one_map = c.lambda == lambda_rule::none;
    fill(weights.q, r.q, m.q_heads * d, width);
    if (c.keys == key_source::own) {
      fill(weights.k, r.k, m.k_heads * d, width);
      fill(weights.v, r.v, m.v_heads * c.value_width, width);
    }
    fill(weights.out, r.out, width, heads * dv);
    if (c.lambda == lambda_rule::gate) fill(weights.lambda_gate, r.lambda_gate, heads, width, o.gate_amplitude);
    if (c.alpha_gate) fill(weights.alpha_gate, r.alpha_gate, heads, width, o.gate_amplitude);
    if (c.output_gate) fill(weights.output_gate, r.output_gate, heads * dv, width, o.gate_amplitude);
    if (c.lambda == lambda_rule::vectors) {
      const T** const vectors[] = {&weights.lambda_q1, &weights.lambda_k1, &weights.lambda_q2, &weights.lambda_k2};
      for (std::size_t i = 0; i < 4; ++i) *vectors[i] = numbers(d, 0.3, r.lambda[i]);
    }
    if (c.lambda == lambda_rule::scalars) {
      weights.lambda_a = numbers(1, 0.3, r.lambda[0]), weights.lambda_b = numbers(1, 0.3, r.lambda[2]);
      r.lambda[1] = r.lambda[3] = {1};
    }
    r.lambda_init = c.lambda_init, r.lambda_factor = c.lambda_factor;
    r.head_norm = {kind(c.norm), c.norm_eps, c.gain, {}, {}};
    if (c.norm_weight) weights.norm = numbers(dv, 1, r.head_norm.weight);
    fill_norm(weights.q_norm, r.q_norm, c.qk_norm, c.qk_norm_eps, d);
    if (c.keys == key_source::own) fill_norm(weights.k_norm, r.k_norm, c.qk_norm, c.qk_norm_eps, d);
    fill_norm(weights.scale_norm, r.scale_norm, c.scale_norm, c.scale_norm_eps, heads * dv);
    if (c.rotates) fill_rope(o.rotary > 0 ? o.rotary : d / 2 * 2);
    r.causal = c.causal, r.window = c.window == attention_mask::unlimited ? 0 : c.window;
    r.scale = c.scale == 0 ? 1 / std::sqrt(double(d)) : c.scale;
  }
  layer(const layer&) = delete;
  layer& operator=(const layer&) = delete;

  layer_args<T> args() const {
    layer_args<T> a;
    a.config = config, a.weights = weights;
    const reference::rotation& r = reference.rope;
    if (config.rotates) a.rope = {r.cos.data(), r.sin.data(), positions, r.width, config.rope, first_position};
    return a;
  }

  layer_config config;
  layer_weights<T> weights;
  reference::layer reference;

 private:
  static reference::norm kind(norm_kind k) {
    return k == norm_kind::none ? reference::norm::none : k == norm_kind::rms ? reference::norm::rms : reference::norm::group;
  }
  const T* numbers(index_t n, double amplitude, std::vector<double>& copy) {
    memory_.push_back(test::normal_vector<T>(n, random_, amplitude));
    copy.assign(memory_.back().begin(), memory_.back().end());
    return memory_.back().data();
  }
  void fill(linear<T>& l, reference::dense& r, index_t outputs, index_t inputs, double amplitude = 1) {
    l.weight = numbers(outputs * inputs, amplitude / std::sqrt(double(inputs)), r.weight);
    if (options_.biases) l.bias = numbers(outputs, 0.5 * amplitude, r.bias);
  }
  void fill_norm(linear<T>& l, reference::row_norm& r, norm_kind k, double eps, index_t n) {
    r.kind = kind(k), r.eps = eps;
    if (k != norm_kind::none && options_.norm_weights) l.weight = numbers(n, 1, r.weight);
    if (k == norm_kind::group && options_.norm_biases) l.bias = numbers(n, 0.5, r.bias);
  }
  void fill_rope(index_t width) {
    reference::rotation& r = reference.rope;
    r.half = config.rope == rope_style::half, r.width = width, r.first = first_position;
    for (index_t p = first_position; p < first_position + positions; ++p)
      for (index_t i = 0; i < width / 2; ++i) {
        const double angle = double(p) * std::pow(100.0, -2 * double(i) / double(width));
        r.cos.push_back(float(std::cos(angle))), r.sin.push_back(float(std::sin(angle)));
      }
  }

  layer_options options_;
  random_source random_;
  std::deque<std::vector<T>> memory_;
};

// ---- Calls ----

class serial : public any_executor {
 public:
  index_t workers() const noexcept override { return 1; }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    for (index_t task = 0; task < tasks; ++task) f(context, task, 0);
  }
};

/// In a workspace that is exactly large enough, not aligned, full of NaN before the call and guarded on both sides.
template <class T>
status run(const layer_args<T>& args, any_executor& executor, std::size_t bytes, std::size_t shift = 1) {
  constexpr unsigned char fill = 0xff;
  std::vector<unsigned char> memory(shift + bytes + 64, fill);
  const status s = diffattn::forward(args, {memory.data() + shift, bytes}, executor);
  const auto untouched = [](unsigned char c) { return c == fill; };
  const auto begin = memory.begin() + std::ptrdiff_t(shift);
  EXPECT_TRUE(std::all_of(memory.begin(), begin, untouched)) << "written before the workspace";
  EXPECT_TRUE(std::all_of(begin + std::ptrdiff_t(bytes), memory.end(), untouched)) << "written behind the workspace";
  return s;
}
template <class T>
status run(const layer_args<T>& args) {
  serial executor;
  return run(args, executor, diffattn::workspace_bytes(args));
}

/// Hidden states with gaps between the rows and guards around them.
template <class T>
class rows {
 public:
  static constexpr T untouched = T(-1234.5);
  rows(index_t batch, index_t tokens, index_t width, index_t gap, T fill)
      : gap_(gap), fill_(fill), memory_(size(batch * tokens * (width + gap) + 2 * margin), fill) {
    view_ = diffattn::view(memory_.data() + margin, batch, tokens, 1, width);
    view_.token_stride += gap, view_.batch_stride = tokens * view_.token_stride;
  }
  rows(const rows&) = delete;
  rows& operator=(const rows&) = delete;

  const tensor_view<T>& view() const { return view_; }
  const std::vector<T>& memory() const { return memory_; }
  void expect_gaps_untouched() {
    for (index_t i = 0; i < view_.batch * view_.tokens; ++i)
      std::fill_n(memory_.begin() + margin + i * (view_.width + gap_), view_.width, fill_);
    EXPECT_TRUE(std::all_of(memory_.begin(), memory_.end(), [this](T x) { return x == fill_; })) << "written outside of out";
  }

 private:
  static constexpr index_t margin = 32;
  index_t gap_;
  T fill_;
  std::vector<T> memory_;
  tensor_view<T> view_;
};

/// Sequences that run through a layer in pieces.
template <class T>
class sequences {
 public:
  /// The first `padding[s]` tokens of a sequence are NaN.
  sequences(const layer<T>& of, std::vector<index_t> lengths, std::vector<index_t> padding = {}, std::uint64_t seed = 5)
      : layer_(of), padding_(std::move(padding)), done(lengths.size(), 0) {
    random_source random(seed);
    is_padded_ = !padding_.empty();
    padding_.resize(lengths.size(), 0);
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      x.push_back(test::normal_vector<T>(lengths[s] * width(), random));
      std::fill_n(x[s].begin(), padding_[s] * width(), std::numeric_limits<T>::quiet_NaN());
      out.emplace_back(x[s].size(), std::numeric_limits<T>::quiet_NaN());
    }
  }

  index_t length(std::size_t s) const { return static_cast<index_t>(x[s].size()) / width(); }

  /// The next n tokens of some sequences, entry b of the call being sequence which[b].
  template <class Run>
  void call(layer_args<T> a, const std::vector<index_t>& which, index_t n, index_t gap, Run&& how) {
    const index_t batch = static_cast<index_t>(which.size());
    rows<T> in(batch, n, width(), gap, std::numeric_limits<T>::quiet_NaN()), to(batch, n, width(), 2 * gap, rows<T>::untouched);
    std::vector<key_range> ranges;
    std::vector<index_t> positions;
    const auto at = [&](std::vector<T>& of, index_t s, index_t t) { return of.begin() + (done[size(s)] + t) * width(); };
    for (index_t b = 0; b < batch; ++b) {
      const index_t s = which[size(b)];
      ASSERT_LE(done[size(s)] + n, length(size(s)));
      for (index_t t = 0; t < n; ++t) std::copy_n(at(x[size(s)], s, t), width(), in.view().at(b, t, 0));
      positions.push_back(done[size(s)] - padding_[size(s)]);
      ranges.push_back({std::min(padding_[size(s)], done[size(s)] + n), done[size(s)] + n});
    }
    a.x = in.view(), a.out = to.view();
    if (a.cache || a.keys_and_values.is_given()) a.sequences = which.data();
    if (is_padded_) a.key_ranges = ranges.data(), a.positions = positions.data();
    const status s = how(a);
    ASSERT_EQ(s, status::ok) << message(s);
    for (index_t b = 0; b < batch; ++b)
      for (index_t t = 0; t < n; ++t)
        std::copy_n(to.view().at(b, t, 0), width(), at(out[size(which[size(b)])], which[size(b)], t));
    to.expect_gaps_untouched();
    for (const index_t sequence : which) done[size(sequence)] += n;
  }
  void call(const layer_args<T>& a, const std::vector<index_t>& which, index_t n, index_t gap = 3) {
    call(a, which, n, gap, [](const layer_args<T>& args) { return run(args); });
  }
  /// The next n tokens of all.
  void call_all(const layer_args<T>& a, index_t n, index_t gap = 3) {
    std::vector<index_t> all(x.size());
    std::iota(all.begin(), all.end(), index_t{0});
    call(a, all, n, gap);
  }

  /// The tokens of one sequence without its padding, for the reference.
  reference::layer_call for_reference(std::size_t s) const {
    reference::layer_call c;
    c.tokens = length(s) - padding_[s], c.positions = {0}, c.u = double(std::numeric_limits<T>::epsilon()) / 2;
    c.x.assign(x[s].begin() + padding_[s] * width(), x[s].end());
    return c;
  }
  void expect_near(std::size_t s, const reference::numbers& r) const {
    std::vector<double> tolerance;
    for (const double e : r.error) tolerance.push_back(for_reference(s).u * e + double(std::numeric_limits<T>::min()));
    const std::vector<T> actual(out[s].begin() + padding_[s] * width(), out[s].end());
    EXPECT_TRUE(test::compare(actual, r.value, tolerance, {{{"token", long(length(s))}, {"channel", long(width())}}}))
        << "sequence " << s;
  }
  /// All of each, as one call of the naive layer.
  void expect_near() const {
    for (std::size_t s = 0; s < x.size(); ++s) {
      if (length(s) == padding_[s]) continue;
      expect_near(s, reference::run(layer_.reference, for_reference(s)));
    }
  }

  std::vector<std::vector<T>> x, out;

 private:
  index_t width() const { return layer_.config.model_width; }
  const layer<T>& layer_;
  std::vector<index_t> padding_;
  bool is_padded_ = false;

 public:
  std::vector<index_t> done;  ///< tokens
};

template <class T>
void expect_near(const model& m, index_t batch, index_t tokens, const layer_options& o = {}, index_t gap = 3) {
  SCOPED_TRACE(m.name + ", batch " + std::to_string(batch) + ", tokens " + std::to_string(tokens) + ", model width " +
               std::to_string(m.config.model_width) + ", head width " + std::to_string(m.config.head_width) +
               (o.biases ? ", biases" : ""));
  const layer<T> l(m, o);
  sequences<T> s(l, std::vector<index_t>(size(batch), tokens));
  s.call_all(l.args(), tokens, gap);
  s.expect_near();
}

template <class T>
struct Layer : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Layer, types);

TYPED_TEST(Layer, EveryFamily) {
  const index_t counts[][2] = {{4, 4}, {4, 2}, {4, 1}, {6, 3}, {1, 1}};
  for (const auto& [heads, kv] : counts)
    for (const model& m : all_models(24, 8, heads, kv))
      for (const bool biases : {false, true}) {
        layer_options o;
        o.biases = biases, o.rotary = biases ? 6 : 0;
        expect_near<TypeParam>(m, 2, 11, o);
      }
}

TYPED_TEST(Layer, WidthsOfTheModel) {
  for (const index_t width : {1, 2, 3, 17, 127, 128, 129, 257}) {
    layer_options o;
    o.biases = width % 2 != 0;
    expect_near<TypeParam>(unilm_v1(width, 43, 3, 1), 1, 3, o);  // 258 channels of queries and of heads
    expect_near<TypeParam>(motif_3(width, 32, 4, 4, 1, true), 2, 5, o);
    expect_near<TypeParam>(llama(width, 16, 8, 2), 3, 1, o);
  }
}

TYPED_TEST(Layer, WidthsOfHeads) {
  for (const index_t d : {1, 2, 3, 5, 15, 16, 17, 33, 64})
    for (model m : all_models(12, d, 2, 1)) {
      if (d == 1) m.config.rotates = false;
      expect_near<TypeParam>(m, 1, 4);
      m.config.value_width = d % 7 + 1;
      expect_near<TypeParam>(m, 1, 4);
    }
}

TYPED_TEST(Layer, NumbersOfTokens) {
  for (const index_t tokens : {1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 33, 61, 64, 65, 127, 129}) {
    const index_t batch = tokens > 40 ? 1 : 1 + tokens % 3, gap = tokens % 2 * 5;
    layer_options o;
    o.biases = tokens % 3 == 0;
    for (const model& m : all_models(10, 4, 2, 1))
      if (tokens < 40 || m.name == "unilm v1" || m.name == "timm, scalars" || m.name == "motif 3, gate")
        expect_near<TypeParam>(m, batch, tokens, o, gap);
  }
}

TYPED_TEST(Layer, Options) {
  struct option {
    const char* name;
    void (*change)(layer_config&);
    bool norm_weights = true, norm_biases = false;
    double gate_amplitude = 1;
  };
  const option options[] = {
      {"alpha gate", [](layer_config& c) { c.alpha_gate = true; }},
      {"large gates", [](layer_config& c) { c.alpha_gate = c.output_gate = true; }, true, false, 8},
      {"output gate", [](layer_config& c) { c.output_gate = true; }},
      {"rms of q and k", [](layer_config& c) { c.qk_norm = norm_kind::rms; }},
      {"rms of q and k without weight", [](layer_config& c) { c.qk_norm = norm_kind::rms, c.qk_norm_eps = 0.5; }, false},
      {"layer norm of q and k", [](layer_config& c) { c.qk_norm = norm_kind::group; }, true, true},
      {"rms of all heads", [](layer_config& c) { c.scale_norm = norm_kind::rms, c.scale_norm_eps = 1e-2; }},
      {"layer norm of all heads", [](layer_config& c) { c.scale_norm = norm_kind::group; }, true, true},
      {"layer norm of all heads without weight", [](layer_config& c) { c.scale_norm = norm_kind::group; }, false},
      {"norms and gates",
       [](layer_config& c) {
         c.qk_norm = c.scale_norm = norm_kind::group;
         c.alpha_gate = c.output_gate = true;
       },
       true, true},
      {"group norm", [](layer_config& c) { c.norm = norm_kind::group, c.norm_eps = 0.1; }},
      {"no norm but weight and gain", [](layer_config& c) { c.norm = norm_kind::none, c.norm_weight = true, c.gain = 0.3; }},
      {"rms norm without weight", [](layer_config& c) { c.norm = norm_kind::rms, c.norm_weight = false; }},
      {"scale", [](layer_config& c) { c.scale = 0.7; }},
      {"not causal", [](layer_config& c) { c.causal = false; }},
      {"window", [](layer_config& c) { c.causal = true, c.window = 4; }},
      {"window of one", [](layer_config& c) { c.causal = true, c.window = 1; }},
      {"other rotation",
       [](layer_config& c) { c.rope = c.rope == rope_style::half ? rope_style::interleaved : rope_style::half; }},
      {"no rotation", [](layer_config& c) { c.rotates = false; }},
      {"negative lambda", [](layer_config& c) { c.lambda_factor = -1.5; }},
  };
  for (const option& change : options)
    for (model m : {unilm_v1(20, 6, 4, 2), unilm_v2(20, 6, 4, 2), motif_3(20, 6, 4, 2, 1, false), llama(20, 6, 4, 2)}) {
      const layer_config before = m.config;
      change.change(m.config);
      if (before.lambda == lambda_rule::none) m.config.alpha_gate = false, m.config.norm = norm_kind::none;
      m.name += std::string(", ") + change.name;
      layer_options o;
      o.norm_weights = change.norm_weights, o.norm_biases = change.norm_biases, o.gate_amplitude = change.gate_amplitude;
      for (const bool biases : {false, true}) {
        o.biases = biases;
        expect_near<TypeParam>(m, 2, 9, o);
      }
    }
}

// ---- Caches ----

template <class T>
diffattn::kv_cache_config cache_for(const layer<T>& l, const cache_choice& choice, index_t count, index_t capacity) {
  diffattn::kv_cache_config c = diffattn::to_cache_config(l.config);
  c.keys = c.values = diffattn::storage_of<T>;
  c.kind = choice.kind, c.page_tokens = choice.page_tokens, c.sequences = count, c.capacity = capacity;
  return c;
}

constexpr cache_choice cache_kinds[] = {test::contiguous, test::ring, {kv_cache_kind::paged, 1}, {kv_cache_kind::paged, 4}};

/// A prompt, single tokens and chunks; of all sequences at a time. In a window, keys are given back as soon as they are unseen.
template <class T>
void expect_pieces_near(const model& m, const cache_choice& choice) {
  SCOPED_TRACE(m.name + ", " + choice.text());
  constexpr index_t pieces[] = {9, 1, 1, 5, 1, 8, 2, 1, 4, 1}, most = 9, total = 33;
  const layer<T> l(m);
  const index_t window = m.config.window;
  const bool bounded = window != attention_mask::unlimited && choice.kind != kv_cache_kind::contiguous;
  owned_cache cache(
      cache_for(l, choice, 2, bounded ? window + most - 1 + (choice.kind == kv_cache_kind::paged ? 4 : 0) : total));
  sequences<T> s(l, {total, total});
  layer_args<T> a = l.args();
  a.cache = cache.operator->();
  for (const index_t n : pieces) {
    s.call_all(a, n);
    for (index_t i = 0; i < 2 && choice.kind == kv_cache_kind::paged && bounded; ++i)
      EXPECT_EQ(cache->discard(i, std::max(cache->length(i) - window + 1, index_t{0})), status::ok);
  }
  s.expect_near();
}

TYPED_TEST(Layer, PiecesThroughACacheAreOneCall) {
  for (model m : all_models(16, 6, 4, 2)) {
    if (!m.config.causal) continue;
    for (const cache_choice& choice : cache_kinds)
      for (const index_t window : {m.config.window, index_t{1}, index_t{7}}) {
        m.config.window = window;
        expect_pieces_near<TypeParam>(m, choice);
      }
  }
}

TYPED_TEST(Layer, SequencesOfDifferentLengths) {
  for (const model& m : all_models(16, 6, 4, 2)) {
    if (!m.config.causal) continue;
    for (const cache_choice& choice : cache_kinds) {
      SCOPED_TRACE(m.name + ", " + choice.text());
      const layer<TypeParam> l(m);
      owned_cache cache(cache_for(l, choice, 5, 30));
      sequences<TypeParam> s(l, {11, 3, 30, 0, 24});
      layer_args<TypeParam> a = l.args();
      a.cache = cache.operator->();
      const index_t prompts[] = {3, 1, 25, 0, 17};
      for (const index_t sequence : {2, 4, 0, 1}) s.call(a, {sequence}, prompts[sequence]);
      for (int step = 0; step < 3; ++step) s.call(a, {4, 0, 2}, 1);
      s.call(a, {2, 1, 0, 4}, 2);
      s.call(a, {4, 0}, 2), s.call(a, {0}, 1);
      EXPECT_EQ(s.done, (std::vector<index_t>{11, 3, 30, 0, 24}));
      s.expect_near();
    }
  }
}

TYPED_TEST(Layer, PaddingOnTheLeft) {
  for (const model& m : all_models(16, 6, 4, 2)) {
    SCOPED_TRACE(m.name);
    const layer<TypeParam> l(m);
    sequences<TypeParam> plain(l, {12, 12, 12}, {0, 3, 7});
    plain.call_all(l.args(), 12);
    plain.expect_near();
    if (!m.config.causal) continue;
    owned_cache cache(cache_for(l, test::contiguous, 3, 19));
    sequences<TypeParam> cached(l, {19, 19, 19}, {5, 0, 9});
    layer_args<TypeParam> a = l.args();
    a.cache = cache.operator->();
    for (const index_t n : {7, 4, 1, 1, 1, 5}) cached.call_all(a, n);  // one sequence begins with nothing but padding
    cached.expect_near();
  }
}

/// What a cache holds of sequence s, for the reference.
reference::keys_and_values stored(const kv_view& view, index_t s) {
  reference::keys_and_values kv;
  kv.kv_len = view.length(s);
  const auto read = [&](const diffattn::kv_rows& from, reference::numbers& to) {
    for (index_t t = 0; t < kv.kv_len; ++t)
      for (index_t h = 0; h < from.heads; ++h)
        for (index_t c = 0; c < from.width; ++c)
          to.add(test::stored_number(from.type, test::stored_row(view, from, s, t, h), c), 0);
  };
  read(view.keys, kv.k), read(view.values, kv.v);
  return kv;
}

/// Bounds of storage.hpp for the rows x of `width` numbers, which themselves are only known to within u · error.
std::vector<double> storage_bounds(storage type, const reference::numbers& x, index_t width, double u) {
  std::vector<double> bounds;
  for (std::size_t i = 0; i < x.value.size(); ++i) {
    const std::size_t row = i / size(width) * size(width), in_row = i - row, block = type == storage::q6 ? in_row / 32 * 32 : 0;
    const std::size_t end = type == storage::q6 ? std::min(size(width), block + 32) : size(width);
    double most = 0;
    for (std::size_t j = row + block; j < row + end; ++j) most = std::max(most, std::fabs(x.value[j]) + u * x.error[j]);
    const double own = std::fabs(x.value[i]) + u * x.error[i];
    const double error = type == storage::f16    ? own * 0x1p-11 + 0x1p-25
                         : type == storage::bf16 ? own * 0x1p-8
                         : type == storage::int8 ? most / 253.9
                         : type == storage::q6   ? most / 61.5
                                                 : 0;
    bounds.push_back(error + u * x.error[i]);
  }
  return bounds;
}

TEST(LayerStored, EveryStorageType) {
  for (const model& m : all_models(16, 36, 2, 1)) {
    if (!m.config.causal) continue;
    for (const storage keys : test::float_storages)
      for (const storage values : test::float_storages) {
        if (keys != values && keys != storage::q6 && values != storage::q6) continue;
        SCOPED_TRACE(m.name + ", " + test::name(keys) + " and " + test::name(values));
        const layer<float> l(m);
        diffattn::kv_cache_config config = cache_for(l, {kv_cache_kind::paged, 4}, 1, 15);
        config.keys = keys, config.values = values;
        owned_cache cache(config);
        sequences<float> s(l, {15});
        layer_args<float> a = l.args();
        a.cache = cache.operator->();
        for (const index_t n : {9, 1, 1, 4}) s.call_all(a, n);
        const reference::layer_call call = s.for_reference(0);
        const reference::keys_and_values exact = reference::project_keys(l.reference, call), held = stored(cache->view(), 0);
        EXPECT_TRUE(test::compare(held.k.value, exact.k.value, storage_bounds(keys, exact.k, config.key_width, call.u)));
        EXPECT_TRUE(test::compare(held.v.value, exact.v.value, storage_bounds(values, exact.v, config.value_width, call.u)));
        s.expect_near(0, reference::run(l.reference, call, held));
      }
  }
}

// ---- Borrowed keys ----

/// A cross-decoder: the second layer reads the cache of the first one.
template <class T>
void expect_borrowing_near(model lender, model borrower) {
  SCOPED_TRACE(borrower.name);
  layer_options o;
  o.biases = true;
  const layer<T> from(lender, o), l(borrower, o);
  for (const cache_choice& choice : cache_kinds) {
    SCOPED_TRACE(choice.text());
    owned_cache cache(cache_for(from, choice, 3, 26));
    sequences<T> own(from, {24, 9, 18}), s(l, {24, 9, 18}, {}, 6);
    layer_args<T> lends = from.args(), a = l.args();
    lends.cache = cache.operator->();
    const auto both = [&](const std::vector<index_t>& which, index_t n) {
      own.call(lends, which, n);
      const std::vector<unsigned char> before = cache.memory();
      a.keys_and_values = cache->view();
      s.call(a, which, n);
      EXPECT_TRUE(cache.memory() == before) << "written to another layer's cache";
    };
    both({2}, 9), both({0}, 15), both({1}, 1);
    for (int step = 0; step < 3; ++step) both({1, 0}, 1);
    both({1, 2, 0}, 5), both({0}, 1), both({2}, 4);
    for (std::size_t i = 0; i < 3; ++i) {
      ASSERT_EQ(s.done[i], s.length(i));
      s.expect_near(
          i, reference::run(l.reference, s.for_reference(i), reference::project_keys(from.reference, own.for_reference(i))));
    }
  }
}

TYPED_TEST(Layer, BorrowsTheKeysOfAnotherLayer) {
  expect_borrowing_near<TypeParam>(phi4flash(16, 6, 4, 2, attention_mask::unlimited), phi4flash_cross(16, 6, 4, 2));
  for (model lender : {unilm_v1(16, 6, 4, 2), unilm_v2(16, 6, 4, 2), motif_3(16, 6, 4, 2, 1, true), llama(16, 6, 4, 2)}) {
    model borrower = lender;
    borrower.config.keys = key_source::borrowed, borrower.config.qk_norm = norm_kind::rms;
    expect_borrowing_near<TypeParam>(lender, borrower);
  }
}

// Encoder-decoder: the queries of any tokens on keys and values that lie somewhere as tensors, with and without a mask.
TYPED_TEST(Layer, BorrowsTensors) {
  using T = TypeParam;
  for (const bool causal : {false, true})
    for (const index_t tokens : {1, 5, 13}) {
      model m = phi4flash_cross(16, 6, 4, 2);
      m.config.causal = causal;
      SCOPED_TRACE((causal ? "causal, tokens " : "tokens ") + std::to_string(tokens));
      const layer<T> l(m);
      sequences<T> s(l, {tokens, tokens});
      random_source random(9);
      const index_t kv_len = 13;
      const std::vector<T> k = test::normal_vector<T>(2 * kv_len * 4 * 6, random),
                           v = test::normal_vector<T>(2 * kv_len * 4 * 6, random);
      layer_args<T> a = l.args();
      const tensor_view<const T> keys = diffattn::view(k.data(), 2, kv_len, 4, 6),
                                 values = diffattn::view(v.data(), 2, kv_len, 4, 6);
      a.keys_and_values = diffattn::view_of_tensors(keys, values);
      s.call_all(a, tokens);
      for (std::size_t i = 0; i < 2; ++i)
        s.expect_near(i, reference::run(l.reference, s.for_reference(i), stored(a.keys_and_values, index_t(i))));
    }
}

// ---- Executors and workspaces ----

class threads : public any_executor {
 public:
  explicit threads(int n) : pool_(n), device_(&pool_, n), executor_(device_) {}
  index_t workers() const noexcept override { return executor_.workers(); }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    executor_.run(tasks, [=](index_t task, index_t worker) { f(context, task, worker); });
  }

 private:
  Eigen::ThreadPool pool_;
  Eigen::ThreadPoolDevice device_;
  diffattn::eigen_executor executor_;
};

class backwards : public any_executor {
 public:
  explicit backwards(index_t workers) : count(workers) {}
  index_t workers() const noexcept override { return count; }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    for (runs += tasks > 0; tasks-- > 0;) f(context, tasks, tasks % count);
  }
  index_t count;
  int runs = 0;
};

/// A loop of prompt, single tokens and a chunk: all bits that it gives.
template <class T>
std::vector<T> outputs(const layer<T>& l, index_t batch, any_executor& executor, std::size_t shift) {
  owned_cache cache(cache_for(l, {kv_cache_kind::paged, 4}, batch, 60));
  sequences<T> s(l, std::vector<index_t>(size(batch), 60));
  layer_args<T> a = l.args();
  a.cache = cache.operator->();
  std::vector<index_t> all(size(batch));
  std::iota(all.begin(), all.end(), index_t{0});
  for (const index_t n : {33, 1, 1, 7, 18})
    s.call(a, all, n, 1, [&](const layer_args<T>& args) {
      return run(args, executor, diffattn::workspace_bytes(args, executor.workers()), shift);
    });
  std::vector<T> bits;
  for (const std::vector<T>& out : s.out) bits.insert(bits.end(), out.begin(), out.end());
  return bits;
}

TYPED_TEST(Layer, SameBitsForEveryExecutorAndWorkspace) {
  model timm = make_model("timm", models::timm({300, 8, 8, 20}, 1), family::interleaved, 4, 4);
  timm.config.qk_norm = norm_kind::rms, timm.config.scale_norm = norm_kind::group;
  for (const model& m : {unilm_v1(300, 40, 4, 2), motif_3(300, 40, 8, 4, 2, true), llama(300, 40, 6, 2), timm})
    for (const index_t batch : {1, 3}) {
      SCOPED_TRACE(m.name + ", batch " + std::to_string(batch));
      layer_options o;
      o.biases = true;
      const layer<TypeParam> l(m, o);
      serial one;
      const std::vector<TypeParam> expected = outputs(l, batch, one, 0);
      for (const std::size_t shift : {1u, 8u, 33u, 63u}) EXPECT_TRUE(test::identical(outputs(l, batch, one, shift), expected));
      backwards reversed(2);
      EXPECT_TRUE(test::identical(outputs(l, batch, reversed, 4), expected));
      for (const int n : {2, 3, 5}) {
        threads pool(n);
        EXPECT_TRUE(test::identical(outputs(l, batch, pool, 4), expected)) << n << " threads";
      }
    }
}

TYPED_TEST(Layer, WorkspaceForALoop) {
  constexpr index_t total = 1030;  // streams cut sequences at 1024 keys
  for (model m : {unilm_v1(16, 6, 4, 2), llama(16, 6, 4, 2), phi4flash(16, 6, 4, 2, 5), motif_3(16, 6, 4, 2, 1, true)}) {
    m.config.rotates = false;
    for (const cache_choice& choice : cache_kinds)
      for (const index_t workers : {1, 3}) {
        SCOPED_TRACE(m.name + ", " + choice.text() + ", workers " + std::to_string(workers));
        const layer<TypeParam> l(m);
        owned_cache cache(cache_for(l, choice, 1, total));
        sequences<TypeParam> s(l, {total});
        layer_args<TypeParam> a = l.args();
        a.cache = cache.operator->();
        backwards executor(workers);
        const auto step = [&](index_t n) {
          s.call(a, {0}, n, 0, [&](const layer_args<TypeParam>& args) {
            const std::size_t needed = diffattn::workspace_bytes(args, workers);
            const std::size_t loop = diffattn::workspace_bytes(args, workers, total);
            EXPECT_LE(needed, loop) << cache->length(0);
            if (cache->length(0) + n == total) {
              EXPECT_EQ(needed, loop);
            }
            EXPECT_EQ(run(args, executor, needed - 1), status::workspace_too_small);
            return run(args, executor, cache->length(0) % 2 == 0 ? needed : loop);
          });
        };
        step(1), step(40);
        const std::vector<TypeParam> zeros(4 * 6 * 975);
        const auto many = [&](const diffattn::kv_rows& r) { return diffattn::view(zeros.data(), 1, 975, r.heads, r.width); };
        ASSERT_EQ(cache->append(many(cache->view().keys), many(cache->view().values)), status::ok);
        s.done[0] += 975;
        step(1), step(1), step(9);
        while (s.done[0] < total) step(1);
      }
  }
}

// ---- Wrong calls ----

/// A valid call of 2 entries of 3 tokens; with `use_cache`, through a cache of 3 sequences that hold 4 tokens each.
struct call {
  static constexpr index_t batch = 2, tokens = 3, held = 4;
  layer<float> of;
  rows<float> x, out;
  std::vector<float> numbers = std::vector<float>(4096, 1.0f);  // for whatever is wrongly given
  std::vector<index_t> which = {2, 0}, positions = {4, 4};
  std::vector<key_range> ranges = {{0, 7}, {2, 7}};
  std::deque<owned_cache> caches;
  diffattn::kv_cache closed;
  std::vector<unsigned char> scratch = std::vector<unsigned char>(1 << 20);
  diffattn::workspace workspace{scratch.data(), scratch.size()};
  backwards executor{1};
  layer_args<float> args;

  explicit call(const model& m)
      : of(m),
        x(batch, tokens, m.config.model_width, 1, 1.0f),
        out(batch, tokens, m.config.model_width, 2, rows<float>::untouched),
        args(of.args()) {
    args.x = x.view(), args.out = out.view();
  }
  diffattn::kv_cache_config cache_config() const { return cache_for(of, {kv_cache_kind::paged, 2}, 3, 10); }
  void use_cache(const diffattn::kv_cache_config& c, index_t length = held) {
    owned_cache& cache = caches.emplace_back(c);
    const kv_view v = cache->view();
    const tensor_view<float> k = diffattn::view(numbers.data(), 3, length, v.keys.heads, v.keys.width);
    const tensor_view<float> values = diffattn::view(numbers.data(), 3, length, v.values.heads, v.values.width);
    if (c.keys != storage::f64) {
      ASSERT_EQ(cache->append(k, values), status::ok);
    }
    args.cache = cache.operator->(), args.sequences = which.data();
  }
  void use_cache() { use_cache(cache_config()); }
  template <class F>
  void use_cache_with(F&& change) {
    diffattn::kv_cache_config c = cache_config();
    change(c);
    use_cache(c);
  }
  /// Entry 1 loses its first two tokens.
  void forget() { EXPECT_EQ(args.cache->discard(0, 2), status::ok); }
  void borrow() { use_cache(), args.keys_and_values = args.cache->view(), args.cache = nullptr; }

  /// An error changes nothing that is not scratch memory, and is told by `check` as far as it can be.
  void expect(status expected) {
    const std::vector<float> old_out = out.memory(), old_x = x.memory(), old_numbers = numbers;
    std::vector<std::vector<unsigned char>> old_caches;
    for (const owned_cache& c : caches) old_caches.push_back(c.memory());
    executor.runs = 0;
    const status told = diffattn::check(args), s = diffattn::forward(args, workspace, executor);
    EXPECT_EQ(s, expected) << "got: " << message(s);
    const bool late = s == status::cache_full || s == status::cache_no_page || s == status::cache_sequence ||
                      (s >= status::executor_workers && s <= status::workspace_overlap);
    if (s == status::ok || (late && told == status::ok)) return expect_same(old_out, old_x, old_numbers, old_caches, s);
    EXPECT_EQ(told, s) << "check: " << message(told);
    EXPECT_EQ(diffattn::workspace_bytes(args), 0u);
    EXPECT_EQ(diffattn::workspace_bytes(args, 2, 100), 0u);
    EXPECT_EQ(executor.runs, 0);
    expect_same(old_out, old_x, old_numbers, old_caches, s);
  }

 private:
  void expect_same(const std::vector<float>& old_out, const std::vector<float>& old_x, const std::vector<float>& old_numbers,
                   const std::vector<std::vector<unsigned char>>& old_caches, status s) const {
    EXPECT_EQ(x.memory(), old_x);
    EXPECT_EQ(numbers, old_numbers);
    if (s == status::ok) return;
    EXPECT_EQ(out.memory(), old_out);
    for (std::size_t i = 0; i < caches.size(); ++i) EXPECT_TRUE(caches[i].memory() == old_caches[i]) << "cache changed";
  }
};

struct misuse {
  status expected;
  void (*make)(call&);
};

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr index_t huge = index_t{1} << 55;

const misuse any_misuses[] = {
    {status::ok, [](call&) {}},
    {status::heads_missing, [](call& c) { c.args.config.heads = {}; }},
    {status::heads_kv_groups, [](call& c) { c.args.config.heads.kv = 3; }},
    {status::layer_width, [](call& c) { c.args.config.model_width = 0; }},
    {status::layer_width, [](call& c) { c.args.config.head_width = -1; }},
    {status::layer_width, [](call& c) { c.args.config.value_width = huge; }},
    {status::layer_one_map, [](call& c) { c.args.config.lambda = lambda_rule::none; }},
    {status::layer_one_map, [](call& c) { c.args.config.heads = diffattn::head_map::single(4, 2); }},
    {status::layer_option, [](call& c) { c.args.config.lambda = static_cast<lambda_rule>(7); }},
    {status::layer_option, [](call& c) { c.args.config.lambda = static_cast<lambda_rule>(-1); }},
    {status::layer_option, [](call& c) { c.args.config.keys = static_cast<key_source>(2); }},
    {status::layer_option, [](call& c) { c.args.config.norm = static_cast<norm_kind>(3); }},
    {status::layer_option, [](call& c) { c.args.config.qk_norm = static_cast<norm_kind>(-1); }},
    {status::layer_option, [](call& c) { c.args.config.scale_norm = static_cast<norm_kind>(3); }},
    {status::norm_eps, [](call& c) { c.args.config.norm_eps = -1e-5; }},
    {status::norm_eps, [](call& c) { c.args.config.norm_eps = not_a_number; }},
    {status::norm_eps, [](call& c) { c.args.config.norm_eps = 1e300; }},
    {status::norm_eps, [](call& c) { c.args.config.qk_norm_eps = double(infinity); }},
    {status::norm_eps, [](call& c) { c.args.config.scale_norm_eps = -1; }},
    {status::norm_gain, [](call& c) { c.args.config.gain = not_a_number; }},
    {status::norm_gain, [](call& c) { c.args.config.gain = -1e300; }},
    {status::scale_not_finite, [](call& c) { c.args.config.scale = 3e38; }},
    {status::scale_not_finite, [](call& c) { c.args.config.scale = not_a_number; }},
    {status::mask_window, [](call& c) { c.args.config.window = 0; }},
    {status::mask_window, [](call& c) { c.args.config.window = -2; }},
    {status::mask_window_not_causal, [](call& c) { c.args.config.window = 3, c.args.config.causal = false; }},
    {status::norm_bias, [](call& c) { c.args.weights.q_norm.bias = c.numbers.data(); }},
    {status::norm_bias, [](call& c) { c.args.weights.scale_norm.bias = c.numbers.data(); }},

    {status::layer_x, [](call& c) { c.args.x.data = nullptr; }},
    {status::layer_x, [](call& c) { c.args.x.width = 7; }},
    {status::layer_x, [](call& c) { c.args.x.width = 0; }},
    {status::layer_x, [](call& c) { c.args.x.width_stride = 2; }},
    {status::layer_x, [](call& c) { c.args.x.heads = 2; }},
    {status::layer_x, [](call& c) { c.args.x.heads = 0; }},
    {status::layer_x, [](call& c) { c.args.x.batch = -1; }},
    {status::layer_x, [](call& c) { c.args.x.tokens = huge; }},
    {status::layer_x, [](call& c) { c.args.x.batch_stride += 1; }},
    {status::layer_x, [](call& c) { c.args.x.token_stride = 7, c.args.x.batch_stride = 21; }},
    {status::layer_x, [](call& c) { c.args.x.token_stride = c.args.x.batch_stride = 0; }},
    {status::layer_x, [](call& c) { c.args.x.token_stride *= -1, c.args.x.batch_stride *= -1; }},
    {status::layer_x,
     [](call& c) { c.args.x.tokens = c.args.out.tokens = 1, c.args.x.batch_stride = 7, c.args.positions = nullptr; }},
    {status::layer_out, [](call& c) { c.args.out.data = nullptr; }},
    {status::layer_out, [](call& c) { c.args.out.width = 7; }},
    {status::layer_out, [](call& c) { c.args.out.width_stride = 0; }},
    {status::layer_out, [](call& c) { c.args.out.heads = 2; }},
    {status::layer_out, [](call& c) { c.args.out.batch = 1; }},
    {status::layer_out, [](call& c) { c.args.out.tokens = 2, c.args.out.batch_stride = 2 * c.args.out.token_stride; }},
    {status::layer_out, [](call& c) { c.args.out.batch_stride -= 1; }},
    {status::layer_out, [](call& c) { c.args.out.token_stride = c.args.out.batch_stride = 0; }},
    {status::layer_out, [](call& c) { c.args.out = c.x.view(); }},
    {status::layer_out, [](call& c) { c.args.out.data = const_cast<float*>(c.args.weights.q.weight) - 10; }},
    {status::layer_out, [](call& c) { c.args.out.data = const_cast<float*>(c.args.weights.out.weight); }},
    {status::layer_out, [](call& c) { c.args.out.data = const_cast<float*>(c.args.weights.norm); }},

    {status::mask_key_range,
     [](call& c) {
       c.ranges[1] = {-1, 2}, c.args.key_ranges = c.ranges.data();
     }},
    {status::mask_key_range,
     [](call& c) {
       c.ranges[1] = {2, 1}, c.args.key_ranges = c.ranges.data();
     }},
    {status::mask_key_range,
     [](call& c) {
       c.ranges[0] = {0, 8}, c.args.key_ranges = c.ranges.data();
     }},

    {status::executor_workers, [](call& c) { c.executor.count = 0; }},
    {status::workspace_overflow, [](call& c) { c.executor.count = (index_t{1} << 20) + 1; }},
    {status::workspace_null, [](call& c) { c.workspace.data = nullptr; }},
    {status::workspace_too_small, [](call& c) { c.workspace.bytes = diffattn::workspace_bytes(c.args) - 1; }},
    {status::workspace_too_small, [](call& c) { c.workspace.bytes = 0; }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.args.out.data; }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<float*>(c.args.x.data); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<float*>(c.args.weights.v.weight); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<float*>(c.args.weights.norm) + 1; }},
};

const misuse rope_misuses[] = {
    {status::layer_rope, [](call& c) { c.args.rope = {}; }},
    {status::layer_rope, [](call& c) { c.args.config.rotates = false; }},
    {status::layer_rope, [](call& c) { c.args.rope.style = rope_style::half; }},
    {status::rope_table, [](call& c) { c.args.rope.cos = nullptr; }},
    {status::rope_table, [](call& c) { c.args.rope.width = 3; }},
    {status::rope_width, [](call& c) { c.args.rope.width = 6; }},
    {status::rope_position, [](call& c) { c.positions[1] = -17, c.args.positions = c.positions.data(); }},
    {status::rope_position, [](call& c) { c.positions[0] = huge, c.args.positions = c.positions.data(); }},
    {status::rope_position, [](call& c) { c.args.rope.positions = 2; }},
    {status::layer_out, [](call& c) { c.args.out.data = const_cast<float*>(c.args.rope.cos); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<float*>(c.args.rope.sin); }},
};

const misuse plain_misuses[] = {
    {status::cache_missing, [](call& c) { c.args.sequences = c.which.data(); }},
    {status::layer_keys, [](call& c) { c.args.keys_and_values.sequences = 2; }},
    {status::layer_keys, [](call& c) { c.borrow(); }},
    {status::layer_keys, [](call& c) { c.args.config.keys = key_source::borrowed, c.args.weights.k = c.args.weights.v = {}; }},
};

const misuse cache_misuses[] = {
    {status::layer_keys, [](call& c) { c.args.keys_and_values = c.args.cache->view(); }},
    {status::layer_keys, [](call& c) { c.args.config.keys = key_source::borrowed, c.args.weights.k = c.args.weights.v = {}; }},
    {status::layer_keys,
     [](call& c) {
       c.args.config.keys = key_source::borrowed, c.args.weights.k = c.args.weights.v = {};
       c.args.keys_and_values = c.args.cache->view();
     }},
    {status::cache_not_open, [](call& c) { c.args.cache = &c.closed; }},
    {status::cache_key_shape, [](call& c) { c.use_cache_with([](auto& k) { k.key_width = 3; }); }},
    {status::cache_key_shape, [](call& c) { c.use_cache_with([](auto& k) { k.heads = head_map::interleaved(4, 4); }); }},
    {status::cache_value_shape, [](call& c) { c.use_cache_with([](auto& k) { k.value_width = 4; }); }},
    {status::cache_value_shape,
     [](call& c) {
       c.use_cache_with([](auto& k) { k.heads = head_map::interleaved(4, 2, diffattn::value_layout::adjacent); });
     }},
    {status::cache_storage, [](call& c) { c.use_cache_with([](auto& k) { k.keys = k.values = storage::f64; }); }},
    {status::cache_heads, [](call& c) { c.use_cache_with([](auto& k) { k.heads = head_map::interleaved_repeated(4, 2); }); }},
    {status::cache_sequence, [](call& c) { c.args.sequences = nullptr; }},
    {status::cache_sequence, [](call& c) { c.which[1] = 3; }},
    {status::cache_sequence, [](call& c) { c.which[0] = -1; }},
    {status::cache_sequence, [](call& c) { c.which[0] = 0; }},
    {status::cache_full, [](call& c) { c.use_cache_with([](auto& k) { k.capacity = 6; }); }},
    {status::cache_full,
     [](call& c) { c.use_cache_with([](auto& k) { k.kind = kv_cache_kind::contiguous, k.capacity = 6; }); }},
    {status::cache_no_page, [](call& c) { c.use_cache_with([](auto& k) { k.pages = 8; }); }},
    // A ring that holds all that is seen but one key.
    {status::cache_range,
     [](call& c) {
       c.args.config.window = 4;
       c.use_cache_with([](auto& k) { k.kind = kv_cache_kind::ring, k.capacity = 5; });
     }},
    {status::ok,
     [](call& c) {
       c.args.config.window = 4;
       c.use_cache_with([](auto& k) { k.kind = kv_cache_kind::ring, k.capacity = 6; });
     }},
    {status::cache_range, [](call& c) { c.use_cache_with([](auto& k) { k.kind = kv_cache_kind::ring, k.capacity = 6; }); }},
    {status::cache_range, [](call& c) { c.forget(); }},
    {status::cache_range, [](call& c) { c.forget(), c.args.config.window = 4; }},
    {status::ok, [](call& c) { c.forget(), c.args.config.window = 3; }},
    {status::ok, [](call& c) { c.forget(), c.args.key_ranges = c.ranges.data(); }},  // they were padding
    {status::layer_out,
     [](call& c) { c.args.out.data = const_cast<float*>(static_cast<const float*>(c.args.cache->view().keys.data)); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<void*>(c.args.cache->view().values.data); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<index_t*>(c.args.cache->view().lengths); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.which.data(); }},
    {status::workspace_overlap, [](call& c) { c.args.positions = c.positions.data(), c.workspace.data = c.positions.data(); }},
    {status::workspace_overlap, [](call& c) { c.args.key_ranges = c.ranges.data(), c.workspace.data = c.ranges.data(); }},
};

const misuse borrowed_misuses[] = {
    {status::ok, [](call&) {}},
    {status::ok,
     [](call& c) {
       c.which = {1, 1};
     }},
    {status::ok, [](call& c) { c.args.keys_and_values.heads = {}; }},
    {status::layer_keys, [](call& c) { c.args.keys_and_values = {}; }},
    {status::layer_keys, [](call& c) { c.use_cache(); }},
    {status::cache_key_shape, [](call& c) { c.args.keys_and_values.keys.heads = 3; }},
    {status::cache_key_shape, [](call& c) { c.args.keys_and_values.keys.width = 5; }},
    {status::cache_value_shape, [](call& c) { c.args.keys_and_values.values.heads = 1; }},
    {status::cache_value_shape, [](call& c) { c.args.keys_and_values.values.width = 5; }},
    {status::cache_storage, [](call& c) { c.args.keys_and_values.keys.type = storage::f64; }},
    {status::cache_storage, [](call& c) { c.args.keys_and_values.values.type = storage::f64; }},
    {status::cache_storage, [](call& c) { c.args.keys_and_values.values.type = static_cast<storage>(9); }},
    {status::cache_heads, [](call& c) { c.args.keys_and_values.heads.queries = head_map::pairing::halves; }},
    {status::cache_heads, [](call& c) { c.args.keys_and_values.heads.kv = 0; }},
    {status::cache_sequence, [](call& c) { c.args.sequences = nullptr; }},
    {status::cache_sequence, [](call& c) { c.which[1] = 3; }},
    {status::cache_sequence, [](call& c) { c.which[1] = huge; }},
    {status::cache_shape, [](call& c) { c.args.keys_and_values.page_tokens = 0; }},
    {status::cache_shape, [](call& c) { c.args.keys_and_values.keys.data = nullptr; }},
    {status::cache_shape,
     [](call& c) { c.args.keys_and_values.lengths = nullptr, c.args.keys_and_values.same_length = huge * 16; }},
    {status::cache_range,
     [](call& c) {
       c.positions = {1, 1, 1}, c.args.keys_and_values.begins = c.positions.data();
     }},
    {status::cache_page, [](call& c) { c.args.keys_and_values.pages = 1; }},
    {status::mask_key_range,
     [](call& c) {
       c.ranges[0] = {0, 5}, c.args.key_ranges = c.ranges.data();
     }},
    {status::layer_out,
     [](call& c) { c.args.out.data = const_cast<float*>(static_cast<const float*>(c.args.keys_and_values.values.data)); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<void*>(c.args.keys_and_values.keys.data); }},
    {status::layer_weight_unexpected, [](call& c) { c.args.weights.k.weight = c.numbers.data(); }},
    {status::layer_weight_unexpected, [](call& c) { c.args.weights.v.bias = c.numbers.data(); }},
    {status::layer_weight_unexpected,
     [](call& c) { c.args.config.qk_norm = norm_kind::group, c.args.weights.k_norm.weight = c.numbers.data(); }},
    {status::layer_weight_unexpected,
     [](call& c) { c.args.config.qk_norm = norm_kind::group, c.args.weights.k_norm.bias = c.numbers.data(); }},
};

/// Every misuse of a table on a call that `prepare` has made.
template <std::size_t N>
void expect_statuses(const misuse (&table)[N], const model& m, void (*prepare)(call&)) {
  for (std::size_t i = 0; i < N; ++i) {
    SCOPED_TRACE(m.name + ", misuse " + std::to_string(i) + ", expected: " + message(table[i].expected));
    call c(m);
    prepare(c);
    table[i].make(c);
    c.expect(table[i].expected);
  }
}

const model& rotating() {
  static const model m = unilm_v1(8, 4, 4, 2);
  return m;
}

TEST(LayerCheck, EveryMisuseHasItsStatus) {
  const auto nothing = [](call&) {};
  const auto cached = [](call& c) { c.use_cache(); };
  for (void (*prepare)(call&) : {static_cast<void (*)(call&)>(nothing), static_cast<void (*)(call&)>(cached)}) {
    expect_statuses(any_misuses, rotating(), prepare);
    expect_statuses(rope_misuses, rotating(), prepare);
  }
  expect_statuses(plain_misuses, rotating(), nothing);
  expect_statuses(cache_misuses, rotating(), cached);
  expect_statuses(borrowed_misuses, phi4flash_cross(8, 4, 4, 2), [](call& c) { c.borrow(); });
  // A table that nobody asked for.
  call c(phi4flash(8, 4, 4, 2, 3));
  c.expect(status::ok);
  c.args.rope = layer<float>(rotating()).args().rope;
  c.expect(status::layer_rope);
}

// One map has no second factor, no factor of its own and no norm.
TEST(LayerCheck, StandardAttentionHasNoOptions) {
  const misuse table[] = {
      {status::ok, [](call&) {}},
      {status::layer_one_map, [](call& c) { c.args.config.lambda = lambda_rule::gate; }},
      {status::layer_one_map, [](call& c) { c.args.config.alpha_gate = true; }},
      {status::layer_one_map, [](call& c) { c.args.config.norm = norm_kind::rms; }},
  };
  expect_statuses(table, llama(8, 4, 4, 2), [](call&) {});
}

/// Where a weight is kept, and whether a layer that has its norm may do without it.
struct weight {
  const char* name;
  const float*& (*of)(layer_weights<float>&);
  const float*& (*bias)(layer_weights<float>&);
  bool optional;
};

#define WEIGHT(x) [](layer_weights<float>& w) -> const float*& { return w.x; }
#define LINEAR(x, optional) \
  { #x, WEIGHT(x.weight), WEIGHT(x.bias), optional }
#define VECTOR(x) \
  { #x, WEIGHT(x), nullptr, false }
const weight all_weights[] = {
    LINEAR(q, false),           LINEAR(k, false),          LINEAR(v, false),  LINEAR(out, false),   VECTOR(lambda_q1),
    VECTOR(lambda_k1),          VECTOR(lambda_q2),         VECTOR(lambda_k2), VECTOR(lambda_a),     VECTOR(lambda_b),
    LINEAR(lambda_gate, false), LINEAR(alpha_gate, false), VECTOR(norm),      LINEAR(q_norm, true), LINEAR(k_norm, true),
    LINEAR(scale_norm, true),   LINEAR(output_gate, false)};
#undef VECTOR
#undef LINEAR
#undef WEIGHT

TEST(LayerCheck, ExactlyTheWeightsOfTheDescription) {
  std::vector<model> some = all_models(8, 4, 4, 2);
  for (const std::size_t i : {std::size_t{0}, std::size_t{2}, std::size_t{8}, some.size() - 1}) {
    model m = some[i];
    m.config.qk_norm = m.config.scale_norm = norm_kind::group;
    if (m.config.lambda == lambda_rule::gate) m.config.alpha_gate = true;
    some.push_back(m);
  }
  std::set<std::string> missed, unexpected;
  for (const model& m : some)
    for (const weight& w : all_weights) {
      SCOPED_TRACE(m.name + ", " + w.name);
      call c(m);
      const float*& data = w.of(c.args.weights);
      if (data) {
        data = nullptr, missed.insert(w.name);
        c.expect(w.optional ? status::ok : status::layer_weight_missing);
        continue;
      }
      data = c.numbers.data(), unexpected.insert(w.name);
      c.expect(status::layer_weight_unexpected);
      if (!w.bias || w.optional) continue;
      data = nullptr, w.bias(c.args.weights) = c.numbers.data();
      c.expect(status::layer_weight_unexpected);
    }
  EXPECT_EQ(missed.size(), std::size(all_weights));
  EXPECT_EQ(unexpected.size(), std::size(all_weights) - 4);  // each of these layers has q, k, v and out
}

TEST(LayerCheck, EmptyCallsTouchNothing) {
  const auto expect_nothing = [](call& c) {
    c.workspace = {};
    const std::vector<float> before = c.out.memory();
    std::vector<unsigned char> memory;
    if (!c.caches.empty()) memory = c.caches[0].memory();
    c.expect(status::ok);
    EXPECT_EQ(c.out.memory(), before);
    if (!c.caches.empty()) {
      EXPECT_TRUE(c.caches[0].memory() == memory);
    }
    EXPECT_EQ(c.executor.runs, 0);
    EXPECT_EQ(diffattn::workspace_bytes(c.args), 0u);
  };
  for (const int kind : {0, 1, 2})
    for (const bool null : {false, true}) {
      SCOPED_TRACE(std::to_string(kind) + (null ? ", null" : ""));
      const model m = kind == 2 ? phi4flash_cross(8, 4, 4, 2) : rotating();
      const auto prepare = [&](call& c) {
        if (kind == 1) c.use_cache();
        if (kind == 2) c.borrow();
        if (null) c.args.x.data = nullptr, c.args.out.data = nullptr;
      };
      call no_batch(m), no_tokens(m);
      prepare(no_batch), prepare(no_tokens);
      no_batch.args.x.batch = no_batch.args.out.batch = 0;
      if (null) no_batch.args.sequences = nullptr;  // an empty vector's data() may be null
      expect_nothing(no_batch);
      no_tokens.args.x.tokens = no_tokens.args.out.tokens = 0;
      no_tokens.args.x.batch_stride = no_tokens.args.out.batch_stride = 0;
      expect_nothing(no_tokens);
    }
}

// The stride of an axis without a second element may be any number.
TEST(LayerCheck, UnusedStrides) {
  for (const index_t stride : {index_t{0}, index_t{-7}, huge / 16}) {
    call c(rotating());
    c.args.x.batch = c.args.x.tokens = c.args.out.batch = c.args.out.tokens = 1;
    c.args.x.batch_stride = c.args.x.token_stride = c.args.x.head_stride = stride;
    c.args.out.batch_stride = c.args.out.token_stride = c.args.out.head_stride = stride;
    c.expect(status::ok);
    EXPECT_NE(*c.args.out.data, rows<float>::untouched);
    call one_token(rotating());
    one_token.args.x.tokens = one_token.args.out.tokens = 1;
    one_token.args.x.token_stride = one_token.args.out.token_stride = stride;
    one_token.expect(status::ok);
    call one_entry(rotating());
    one_entry.args.x.batch = one_entry.args.out.batch = 1;
    one_entry.args.x.batch_stride = one_entry.args.out.batch_stride = stride;
    one_entry.expect(status::ok);
  }
}

// Whatever the fields are, as long as the arrays are as long as they say: a status, and no read beyond an array.
TEST(LayerCheck, Garbage) {
  const index_t least = std::numeric_limits<index_t>::min(), most = std::numeric_limits<index_t>::max();
  random_source random(77);
  std::set<status> seen;
  for (int sample = 0; sample < 2000; ++sample) {
    const bool borrows = random.coin();
    call c(borrows ? phi4flash_cross(8, 4, 4, 2) : rotating());
    borrows ? c.borrow() : c.use_cache();
    const auto any = [&] {
      return random.pick<index_t>({0, 1, -1, 2, 3, 4, 7, huge, -huge, least, least + 1, most, most / 2});
    };
    layer_args<float>& a = c.args;
    kv_view& kv = a.keys_and_values;
    std::vector<index_t> lengths = {4, 4, 4}, begins = {0, 0, 0};
    if (borrows && random.coin()) kv.lengths = lengths.data(), kv.begins = begins.data();
    for (int i = 0; i < 3; ++i) switch (random.integer(0, borrows ? 20 : 13)) {
        case 0: a.x.batch = a.out.batch = random.pick<index_t>({-1, 0, 1, 2, least}); break;
        case 1: a.x.tokens = a.out.tokens = any(); break;
        case 2: a.x.token_stride = any(); break;
        case 3: a.out.batch_stride = any(); break;
        case 4: a.config.model_width = any(); break;
        case 5: a.config.head_width = any(); break;
        case 6: a.config.heads.heads = any(); break;
        case 7: a.config.heads.kv = any(); break;
        case 8: a.config.window = any(); break;
        case 9: c.which[0] = any(); break;
        case 10: c.positions[1] = any(), a.positions = c.positions.data(); break;
        case 11: c.ranges[0] = {any(), any()}, a.key_ranges = c.ranges.data(); break;
        case 12: a.rope.first_position = any(); break;
        case 13: a.rope.positions = any(); break;
        case 14: lengths[0] = any(); break;
        case 15: begins[2] = any(); break;
        case 16: kv.heads.heads = any(); break;
        case 17: kv.heads.kv = any(); break;
        case 18: kv.page_tokens = any(); break;
        case 19: kv.keys.page_stride = any(); break;
        default: kv.lengths = nullptr, kv.same_length = any(); break;
      }
    const status s = diffattn::check(a);
    seen.insert(s);
    EXPECT_TRUE(s == status::ok || diffattn::workspace_bytes(a) == 0);
    EXPECT_TRUE(s == status::ok || diffattn::workspace_bytes(a, 1, any()) == 0);
  }
  EXPECT_GE(seen.size(), 12u);
}

}  // namespace
