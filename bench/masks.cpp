// SPDX-License-Identifier: MIT

// What each mask and rule of the logits costs beside a call without any.
//
//   masks [--smoke] [--benchmark_...]
//
// Sampled rows of every call are checked against double arithmetic before it is timed. The table gives medians.

#include <cmath>
#include <diffattn/forward.hpp>
#include <exception>
#include <functional>
#include <limits>
#include <random>

#include "check.hpp"
#include "harness.hpp"

namespace {

using bench::index_t;
using bench::samples;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr index_t heads = 2, d = 64, block = 64;

/// One call: what it is told, and what that means for one pair of query and key.
struct rule {
  const char* name;
  std::function<void(diffattn::forward_args<float>&)> apply;
  std::function<double(index_t h, index_t i, index_t j)> added;  ///< to the logit; −∞ hides. Null: nothing
  double cap = 0, sink = -infinity;
};

class calls {
 public:
  explicit calls(index_t n) : n_(n) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    for (std::vector<float>* x : {&q_, &k_, &v_, &out_}) x->resize(static_cast<std::size_t>(n * 2 * heads * d));
    for (std::vector<float>* x : {&q_, &k_, &v_})
      for (float& e : *x) e = normal(random);
    bias_.resize(static_cast<std::size_t>(n * n)), shows_most_.resize(bias_.size()), shows_blocks_.resize(bias_.size());
    shows_all_.assign(bias_.size(), 1);
    for (float& e : bias_) e = normal(random);
    for (unsigned char& e : shows_most_) e = random() % 8 != 0;
    for (index_t i = 0; i < n; ++i)
      for (index_t j = 0; j < n; ++j) shows_blocks_[at(i, j)] = in_block(i, j);
    for (index_t r = 0; r * block < n; ++r) {
      begins_.push_back(static_cast<index_t>(blocks_.size()));
      for (index_t c = 0; c * block < n; ++c)
        if (in_block(r * block, c * block)) blocks_.push_back(c);
    }
    begins_.push_back(static_cast<index_t>(blocks_.size()));
    for (const index_t quarter : {0, 1, 2, 3, 4}) starts_.push_back(static_cast<std::int32_t>(quarter * n / 4));
    padding_ = {n / 4, n};
  }

  std::vector<rule> rules() const {
    using args = diffattn::forward_args<float>;
    const auto shown = [](bool yes) { return yes ? 0.0 : -infinity; };
    const auto array = [this](const std::vector<unsigned char>& x) {
      return [this, &x](args& a) { a.logits.visible = {x.data(), 0, 0, n_, 1}; };
    };
    const index_t n = n_;
    return {
        {"none", [](args&) {}, nullptr},
        {"causal", [](args& a) { a.mask.causal = true; }, [=](index_t, index_t i, index_t j) { return shown(j <= i); }},
        {"window of a quarter", [=](args& a) { a.mask.causal = true, a.mask.window = n / 4; },
         [=](index_t, index_t i, index_t j) { return shown(j <= i && i - j < n / 4); }},
        {"a quarter is padding", [this](args& a) { a.mask.key_ranges = &padding_; },
         [=](index_t, index_t, index_t j) { return shown(j >= n / 4); }},
        {"4 packed sequences",
         [this](args& a) { a.mask.sequences = 4, a.mask.query_starts = a.mask.key_starts = starts_.data(); },
         [=](index_t, index_t i, index_t j) { return shown(i / (n / 4) == j / (n / 4)); }},
        {"soft cap", [](args& a) { a.logits.soft_cap = 30; }, nullptr, 30},
        {"ALiBi", [this](args& a) { a.logits.slopes = slopes_; },
         [this](index_t h, index_t i, index_t j) { return -double(slopes_[h]) * std::fabs(double(i - j)); }},
        {"bias",
         [this](args& a) {
           a.logits.bias = {bias_.data(), 0, 0, n_, 1};
         },
         [this](index_t, index_t i, index_t j) { return double(bias_[at(i, j)]); }},
        {"boolean, shows all", array(shows_all_), nullptr},
        {"boolean, hides 1 of 8", array(shows_most_),
         [=](index_t, index_t i, index_t j) { return shown(shows_most_[at(i, j)] != 0); }},
        {"boolean, a quarter in blocks", array(shows_blocks_),
         [=](index_t, index_t i, index_t j) { return shown(in_block(i, j)); }},
        {"block list, a quarter", [this](args& a) { a.logits.blocks = {block, block, begins_.data(), blocks_.data(), 0, 0}; },
         [=](index_t, index_t i, index_t j) { return shown(in_block(i, j)); }},
        {"predicate with tiles, a quarter",
         [](args& a) {
           a.logits.predicate = {nullptr, sees, sees_tile};
         },
         [=](index_t, index_t i, index_t j) { return shown(in_block(i, j)); }},
        {"sinks", [this](args& a) { a.logits.sinks = sinks_; }, nullptr, 0, 1.5},
    };
  }

  diffattn::forward_args<float> arguments(const rule& r) {
    diffattn::forward_args<float> a;
    const auto order = diffattn::layout::bhtd;
    a.q = diffattn::view<const float>(q_.data(), 1, n_, 2 * heads, d, order);
    a.k = diffattn::view<const float>(k_.data(), 1, n_, 2 * heads, d, order);
    a.v = diffattn::view<const float>(v_.data(), 1, n_, heads, 2 * d, order);
    a.out = diffattn::view(out_.data(), 1, n_, heads, 2 * d, order);
    a.heads = diffattn::head_map::interleaved(heads, heads), a.lambda = 0.36f;
    r.apply(a);
    return a;
  }

  /// Throws unless sampled rows of the call's result are right. The share of all pairs of query and key that they see.
  double check(const rule& r) {
    const diffattn::forward_args<float> a = arguments(r);
    const diffattn::owned_workspace w(diffattn::workspace_bytes(a));
    diffattn::throw_if_error(diffattn::forward(a, w.view()));
    for (const index_t row : {index_t{0}, n_ / 3, n_ / 2 + 1, n_ - 1}) {
      reference::problem<float> p;
      p.q_len = 1, p.kv_len = n_, p.d = d, p.dv = 2 * d;
      p.q = bench::reference_tensor(a.q, row), p.k = bench::reference_tensor(a.k), p.v = bench::reference_tensor(a.v);
      p.scale = 1 / std::sqrt(double(d)), p.kind = reference::norm::rms, p.eps = double(a.norm.eps);
      if (r.added) p.added = [&](int, long, long h, long, long j) { return r.added(h, row, j); };
      for (long h = 0; h < heads; ++h) {
        p.heads.push_back({{2 * h, 2 * h + 1}, {2 * h, 2 * h + 1}, h, -1});
        p.factor[0].push_back(1), p.factor[1].push_back(double(0.36f));
        for (int m = 0; m < 2; ++m) p.cap[m] = r.cap, p.sink[m].push_back(r.sink);
      }
      const reference::numbers expected = reference::attention(p).out;
      for (index_t h = 0; h < heads; ++h)
        bench::checked_error(a.out.at(0, row, h), 2 * d, expected, h * 2 * d,
                             std::string(r.name) + ", row " + std::to_string(row));
    }
    double pairs = 0;
    for (index_t i = 0; i < n_; ++i)
      for (index_t j = 0; j < n_; ++j) pairs += !r.added || r.added(0, i, j) != -infinity;
    return pairs / double(n_ * n_);
  }

 private:
  static bool in_block(index_t i, index_t j) { return (i / block + j / block) % 4 == 0; }
  static bool sees(const void*, index_t, index_t, index_t i, index_t j) { return in_block(i, j); }
  static diffattn::sight sees_tile(const void*, index_t, index_t, index_t first, index_t last, diffattn::key_range keys) {
    if (first / block != last / block || keys.begin / block != (keys.end - 1) / block) return diffattn::sight::some;
    return in_block(first, keys.begin) ? diffattn::sight::all : diffattn::sight::none;
  }
  std::size_t at(index_t i, index_t j) const { return static_cast<std::size_t>(i * n_ + j); }

  index_t n_;
  std::vector<float> q_, k_, v_, out_, bias_;
  std::vector<unsigned char> shows_all_, shows_most_, shows_blocks_;
  std::vector<index_t> begins_, blocks_;
  std::vector<std::int32_t> starts_;
  diffattn::key_range padding_;
  float slopes_[heads] = {0.125f, 0.03125f}, sinks_[heads] = {1.5f, 1.5f};
};

}  // namespace

int main(int argc, char** argv) {
  bench::command_line flags;
  if (!flags.parse(argc, argv, 11, "0.02")) return 1;
  calls all(flags.smoke ? 256 : 2048);
  const std::vector<rule> rules = all.rules();
  std::map<std::string, double> pairs;
  try {
    for (const rule& r : rules) pairs[r.name] = all.check(r);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  for (const rule& r : rules)
    benchmark::RegisterBenchmark(r.name, [&all, &r](benchmark::State& state) {
      const diffattn::forward_args<float> a = all.arguments(r);
      const diffattn::owned_workspace w(diffattn::workspace_bytes(a));
      for (auto _ : state) diffattn::throw_if_error(diffattn::forward(a, w.view()));
    })->Unit(benchmark::kMillisecond);
  std::map<std::string, samples> measured = flags.run();
  const double plain = measured[rules[0].name].time();
  std::fprintf(flags.table_stream(), "\n%-32s %12s %8s %8s %22s\n", "rule", "time", "/ none", "pairs", "time of a pair / none");
  for (const rule& r : rules)
    if (const double time = measured[r.name].time(); time == time)
      std::fprintf(flags.table_stream(), "%-32s %9.3f ms %8.3f %8.3f %22.3f\n", r.name, time * 1e3, time / plain, pairs[r.name],
                   time / plain / pairs[r.name]);
  benchmark::Shutdown();
}
