// SPDX-License-Identifier: MIT
#pragma once

// One shape of the comparison: its tensors, the calls on them, and the check that comes before any timing.

#include <cstring>
#include <diffattn/attention.hpp>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../tests/support/golden.hpp"
#include "check.hpp"
#include "harness.hpp"
#include "unfused.hpp"

namespace bench {

enum class contender { differential, standard, unfused };

inline const char* name(contender c) {
  return c == contender::differential ? "differential" : c == contender::standard ? "standard" : "unfused";
}

struct shape {
  bool causal = false;
  index_t d = 64, n = 128, heads = 8;
  int threads = 1;
  bool real = false;
  index_t window = 0;  // 0: none; else also causal

  const char* mask() const { return window > 0 ? "window" : causal ? "causal" : "full"; }
  /// Is there a composition of Eigen's products for it?
  bool has_unfused() const { return threads == 1 && window == 0; }
  std::string suffix(const char* type) const {
    return std::string(type) + "/" + mask() + (window > 0 ? ":" + std::to_string(window) : "") + "/d:" + std::to_string(d) +
           "/n:" + std::to_string(n) + "/threads:" + std::to_string(threads) + (real ? "/data:real" : "");
  }

  /// Useful FLOP: 8 d for each visible pair of query and key and differential head (two products of width d with the keys, one
  /// of width 2 d with the values, 2 FLOP each), for every contender; exponentials, masks and norms count as nothing.
  double flop() const {
    const double keys = static_cast<double>(n), hidden = static_cast<double>(window > 0 ? n - window : 0);
    const double pairs = (causal ? keys * (keys + 1) / 2 : keys * keys) - hidden * (hidden + 1) / 2;
    return 8.0 * static_cast<double>(d) * pairs * static_cast<double>(heads);
  }
};

/// q, k, v of a trained model (layer 2, causal, λ = 0.617), its λ and its result, from data/real_layer2.safetensors.
inline const test::golden_file& real_data() {
  static const test::golden_file file(BENCH_REAL_DATA);
  return file;
}

template <class T>
class problem {
 public:
  explicit problem(const shape& s) : shape_(s) {
    const std::size_t size = static_cast<std::size_t>(s.n * 2 * s.heads * s.d);
    for (std::vector<T>* x : {&q_, &k_, &v_}) x->resize(size);
    for (std::vector<T>* x : {&out_, &standard_out_, &unfused_out_}) x->assign(size, T(0));
    const index_t n = s.n, d = s.d, heads = s.heads;
    // Heads contiguous, as every peer's fastest form wants them; the model's own data keeps its [tokens, heads, width].
    const diffattn::layout order = s.real ? diffattn::layout::bthd : diffattn::layout::bhtd;
    args_.q = diffattn::view<const T>(q_.data(), 1, n, 2 * heads, d, order);
    args_.k = diffattn::view<const T>(k_.data(), 1, n, 2 * heads, d, order);
    args_.out = diffattn::view(out_.data(), 1, n, heads, 2 * d, order);
    args_.mask.causal = s.causal;
    if (s.window > 0) args_.mask.window = s.window;
    if (s.real) {  // Hugging Face layout: halves, two narrow value heads
      copy_tiled("kernel.q", q_), copy_tiled("kernel.k", k_), copy_tiled("kernel.v", v_);
      args_.v = diffattn::view<const T>(v_.data(), 1, n, 2 * heads, d, order);
      args_.heads = diffattn::head_map::halves(heads, 2 * heads);
      args_.lambda = static_cast<T>(real_data()["kernel.lambda"].values[0]);
      args_.norm.gain = static_cast<T>(real_data().number("out_scale"));
    } else {
      std::mt19937_64 random(static_cast<std::uint64_t>(n * 1000 + d));
      std::normal_distribution<T> normal;
      for (std::vector<T>* x : {&q_, &k_, &v_})
        for (T& e : *x) e = normal(random);
      args_.v = diffattn::view<const T>(v_.data(), 1, n, heads, 2 * d, order);
      args_.heads = diffattn::head_map::interleaved(heads, heads);
      args_.lambda = T(0.36);
      args_.norm.gain = static_cast<T>(1 - diffattn::lambda_init(3));
    }
    // The same tensors as standard attention with as many parameters: twice the heads, each of width d.
    standard_.q = args_.q, standard_.k = args_.k;
    standard_.v = diffattn::view<const T>(v_.data(), 1, n, 2 * heads, d, order);
    standard_.out = diffattn::view(standard_out_.data(), 1, n, 2 * heads, d, order);
    standard_.mask = args_.mask;
    if (s.threads > 1) team_ = std::make_unique<team>(s.threads);
    scratch_.resize(std::max(diffattn::workspace_bytes(args_, s.threads), diffattn::workspace_bytes(standard_, s.threads)));
    check();
  }

  const shape& dimensions() const { return shape_; }
  double error() const { return error_; }
  double unfused_error() const { return unfused_error_; }

  void run(contender c) {
    const diffattn::workspace w{scratch_.data(), scratch_.size()};
    if (c == contender::unfused) {
      diffattn::forward_args<T> a = args_;
      a.out.data = unfused_out_.data();
      for (index_t h = 0; h < shape_.heads; ++h) unfused_.head(a, 0, h);
    } else if (team_) {
      const diffattn::eigen_executor executor = team_->executor();
      diffattn::throw_if_error(c == contender::differential ? forward(args_, w, executor) : attention(standard_, w, executor));
    } else {
      diffattn::throw_if_error(c == contender::differential ? forward(args_, w) : attention(standard_, w));
    }
  }

 private:
  void copy_tiled(const char* tensor, std::vector<T>& to) const {
    const std::vector<double>& from = real_data()[tensor].values;
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<T>(from[i % from.size()]);
  }

  /// Runs every contender once and compares sampled rows of all heads with the naive reference in double, within its bound.
  void check() {
    for (const contender c : {contender::differential, contender::standard, contender::unfused})
      if (c != contender::unfused || shape_.has_unfused()) run(c);
    diffattn::tensor_view<const T> unfused_out = args_.out;
    unfused_out.data = unfused_out_.data();
    const index_t samples = std::min<index_t>(shape_.n, 16);
    for (index_t i = 0; i < samples; ++i) {
      const index_t row = samples == 1 ? 0 : i * (shape_.n - 1) / (samples - 1);
      reference::problem<T> p = reference_row(row, args_.v);
      for (index_t h = 0; h < shape_.heads; ++h) {
        const diffattn::head_indices at = args_.heads[h];
        p.heads.push_back({{at.query_1, at.query_2}, {at.key_1, at.key_2}, at.value_1, at.value_2});
        p.factor[0].push_back(1), p.factor[1].push_back(static_cast<double>(args_.lambda.at(0, 0, 0)));
      }
      p.dv = args_.out.width, p.kind = reference::norm::rms;
      p.eps = static_cast<double>(args_.norm.eps), p.gain = static_cast<double>(args_.norm.gain);
      const reference::numbers expected = reference::attention(p).out;
      error_ = std::max(error_, compare(args_.out, row, expected));
      if (shape_.has_unfused()) unfused_error_ = std::max(unfused_error_, compare(unfused_out, row, expected));

      reference::problem<T> single = reference_row(row, standard_.v);
      for (index_t h = 0; h < 2 * shape_.heads; ++h) {
        single.heads.push_back({{h, h}, {h, h}, h, -1});
        single.factor[0].push_back(1), single.factor[1].push_back(0);
      }
      single.dv = standard_.out.width;
      compare(standard_.out, row, reference::attention(single).out);
    }
    if (shape_.real && shape_.n == 512) check_stored_result();
    if (shape_.threads > 1) check_threads();
  }

  /// One query row as a problem of its own.
  reference::problem<T> reference_row(index_t row, const diffattn::tensor_view<const T>& v) const {
    reference::problem<T> p;
    p.q_len = 1, p.kv_len = shape_.n, p.d = shape_.d;
    p.q = reference_tensor(args_.q, row), p.k = reference_tensor(args_.k), p.v = reference_tensor(v);
    p.scale = 1 / std::sqrt(static_cast<double>(shape_.d));
    p.causal = shape_.causal, p.offset = row;
    if (shape_.window > 0) p.window = shape_.window;
    return p;
  }

  /// The largest error of one row; throws if it exceeds the reference's bound.
  double compare(const diffattn::tensor_view<const T>& out, index_t row, const reference::numbers& expected) const {
    double largest = 0;
    for (index_t h = 0; h < out.heads; ++h) {
      const std::string where = shape_.suffix("float") + ", row " + std::to_string(row) + ", head " + std::to_string(h);
      largest = std::max(largest, checked_error(out.at(0, row, h), out.width, expected, h * out.width, where));
    }
    return largest;
  }

  /// The model's own result; 8e-6 is the bound that the data's authors derived for float32 kernels.
  void check_stored_result() const {
    const std::vector<double>& expected = real_data()["kernel.out"].values;
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (!(std::fabs(static_cast<double>(out_[i]) - expected[i]) <= 8e-6))
        throw std::runtime_error("stored result of the trained model not met");
  }

  void check_threads() {
    const std::vector<T> threaded = out_;
    diffattn::throw_if_error(forward(args_, diffattn::workspace{scratch_.data(), scratch_.size()}));
    if (std::memcmp(threaded.data(), out_.data(), out_.size() * sizeof(T)) != 0)
      throw std::runtime_error("results depend on the number of threads");
  }

  shape shape_;
  std::vector<T> q_, k_, v_, out_, standard_out_, unfused_out_;
  diffattn::forward_args<T> args_;
  diffattn::attention_args<T> standard_;
  std::vector<unsigned char> scratch_;
  std::unique_ptr<team> team_;
  unfused<T> unfused_;
  double error_ = 0, unfused_error_ = 0;
};

}  // namespace bench
