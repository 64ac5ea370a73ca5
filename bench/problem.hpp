// SPDX-License-Identifier: MIT
#pragma once

// One shape of the comparison: its tensors, the calls on them, and the check that comes before any timing.

#define EIGEN_USE_THREADS
#include <unsupported/Eigen/CXX11/Tensor>
//
#include <algorithm>
#include <cmath>
#include <cstring>
#include <diffattn/attention.hpp>
#include <diffattn/executor/eigen_thread_pool.hpp>
#include <diffattn/forward.hpp>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../tests/support/golden.hpp"
#include "unfused.hpp"

namespace bench {

using diffattn::index_t;

enum class contender { differential, standard, unfused };

inline const char* name(contender c) {
  return c == contender::differential ? "differential" : c == contender::standard ? "standard" : "unfused";
}

struct shape {
  bool causal = false;
  index_t d = 64, n = 128, heads = 8;
  int threads = 1;
  bool real = false;

  std::string suffix(const char* type) const {
    return std::string(type) + (causal ? "/causal" : "/full") + "/d:" + std::to_string(d) + "/n:" + std::to_string(n) +
           "/threads:" + std::to_string(threads) + (real ? "/data:real" : "");
  }

  /// Useful FLOP: 8 d for each visible pair of query and key and differential head (two products of width d with the keys, one
  /// of width 2 d with the values, 2 FLOP each), for every contender; exponentials, masks and norms count as nothing.
  double flop() const {
    const double keys = static_cast<double>(n), pairs = causal ? keys * (keys + 1) / 2 : keys * keys;
    return 8.0 * static_cast<double>(d) * pairs * static_cast<double>(heads);
  }
};

/// q, k, v of a trained model (layer 2, causal, λ = 0.617), its λ and its result, from data/real_layer2.safetensors.
inline const golden::file& real_data() {
  static const golden::file file(BENCH_REAL_DATA);
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
    args_.q = diffattn::view<const T>(q_.data(), 1, n, 2 * heads, d);
    args_.k = diffattn::view<const T>(k_.data(), 1, n, 2 * heads, d);
    args_.out = diffattn::view(out_.data(), 1, n, heads, 2 * d);
    args_.mask.causal = s.causal;
    if (s.real) {  // Hugging Face layout: halves, two narrow value heads
      copy_tiled("kernel.q", q_), copy_tiled("kernel.k", k_), copy_tiled("kernel.v", v_);
      args_.v = diffattn::view<const T>(v_.data(), 1, n, 2 * heads, d);
      args_.heads = diffattn::head_map::halves(heads, 2 * heads);
      args_.lambda = static_cast<T>(real_data().values("kernel.lambda").at(0));
      args_.norm.gain = static_cast<T>(std::stod(real_data().meta("out_scale")));
    } else {
      std::mt19937_64 random(static_cast<std::uint64_t>(n * 1000 + d));
      std::normal_distribution<T> normal;
      for (std::vector<T>* x : {&q_, &k_, &v_})
        for (T& e : *x) e = normal(random);
      args_.v = diffattn::view<const T>(v_.data(), 1, n, heads, 2 * d);
      args_.heads = diffattn::head_map::interleaved(heads, heads);
      args_.lambda = T(0.36);
      args_.norm.gain = static_cast<T>(1 - diffattn::lambda_init(3));
    }
    // The same tensors as standard attention with as many parameters: twice the heads, each of width d.
    standard_.q = args_.q, standard_.k = args_.k;
    standard_.v = diffattn::view<const T>(v_.data(), 1, n, 2 * heads, d);
    standard_.out = diffattn::view(standard_out_.data(), 1, n, 2 * heads, d);
    standard_.mask = args_.mask;
    if (s.threads > 1) {
      pool_ = std::make_unique<Eigen::ThreadPool>(s.threads - 1);
      device_ = std::make_unique<Eigen::ThreadPoolDevice>(pool_.get(), s.threads);
    }
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
    } else if (device_) {
      const diffattn::eigen_executor executor(*device_);
      diffattn::throw_if_error(c == contender::differential ? forward(args_, w, executor) : attention(standard_, w, executor));
    } else {
      diffattn::throw_if_error(c == contender::differential ? forward(args_, w) : attention(standard_, w));
    }
  }

 private:
  void copy_tiled(const char* tensor, std::vector<T>& to) const {
    const std::vector<double>& from = real_data().values(tensor);
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<T>(from[i % from.size()]);
  }

  /// Runs every contender once and compares sampled rows of all heads with double arithmetic; threads with one thread, exactly.
  void check() {
    for (const contender c : {contender::differential, contender::standard, contender::unfused})
      if (c != contender::unfused || shape_.threads == 1) run(c);
    double standard_error = 0, largest = 0;
    const index_t samples = std::min<index_t>(shape_.n, 16);
    for (index_t s = 0; s < samples; ++s) {
      const index_t row = samples == 1 ? 0 : s * (shape_.n - 1) / (samples - 1);
      for (index_t h = 0; h < shape_.heads; ++h) {
        const std::vector<double> expected = differential_row(row, h);
        for (std::size_t c = 0; c < expected.size(); ++c) {
          const index_t i = static_cast<index_t>(c);
          largest = std::max(largest, std::fabs(expected[c]));
          error_ = std::max(error_, difference(args_.out.at(0, row, h)[i], expected[c]));
          const std::size_t at = static_cast<std::size_t>(args_.out.at(0, row, h) - out_.data()) + c;
          if (shape_.threads == 1) unfused_error_ = std::max(unfused_error_, difference(unfused_out_[at], expected[c]));
        }
      }
      for (index_t h = 0; h < 2 * shape_.heads; ++h) {
        const std::vector<double> expected =
            map_times_values(standard_.q.at(0, row, h), standard_.k, h, standard_.v, h, -1, row);
        for (std::size_t c = 0; c < expected.size(); ++c)
          standard_error = std::max(standard_error, difference(standard_.out.at(0, row, h)[c], expected[c]));
      }
    }
    // The norm turns a difference of two maps of relative error ~ n^½ ε into an output of size 1: 64 ε leaves room for the
    // unfused form as well and is far below what any mistake does.
    const double tolerance = 64 * static_cast<double>(std::numeric_limits<T>::epsilon()) * std::max(1.0, largest);
    if (!(std::max({error_, unfused_error_, standard_error}) <= tolerance))
      throw std::runtime_error("wrong result at " + shape_.suffix("") + ": errors " + std::to_string(error_) + " " +
                               std::to_string(standard_error) + " " + std::to_string(unfused_error_));
    if (shape_.real && shape_.n == 512) check_stored_result();
    if (shape_.threads > 1) check_threads();
  }

  static double difference(T a, double b) {
    const double e = std::fabs(static_cast<double>(a) - b);
    return e == e ? e : std::numeric_limits<double>::infinity();
  }

  /// softmax(q kᵀ / √d) v of one row in double.
  std::vector<double> map_times_values(const T* q, const diffattn::tensor_view<const T>& k, index_t key_head,
                                       const diffattn::tensor_view<const T>& v, index_t value_1, index_t value_2,
                                       index_t row) const {
    const index_t keys = shape_.causal ? row + 1 : shape_.n;
    std::vector<double> p(static_cast<std::size_t>(keys)), out(static_cast<std::size_t>(value_2 < 0 ? v.width : 2 * v.width));
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (index_t j = 0; j < keys; ++j) {
      double dot = 0;
      for (index_t i = 0; i < shape_.d; ++i) dot += static_cast<double>(q[i]) * static_cast<double>(k.at(0, j, key_head)[i]);
      p[static_cast<std::size_t>(j)] = dot / std::sqrt(static_cast<double>(shape_.d));
      top = std::max(top, p[static_cast<std::size_t>(j)]);
    }
    for (double& x : p) sum += x = std::exp(x - top);
    for (index_t j = 0; j < keys; ++j)
      for (std::size_t c = 0; c < out.size(); ++c) {
        const index_t i = static_cast<index_t>(c);
        const T value = i < v.width ? v.at(0, j, value_1)[i] : v.at(0, j, value_2)[i - v.width];
        out[c] += p[static_cast<std::size_t>(j)] / sum * static_cast<double>(value);
      }
    return out;
  }

  std::vector<double> differential_row(index_t row, index_t h) const {
    const diffattn::head_indices i = args_.heads[h];
    std::vector<double> out =
        map_times_values(args_.q.at(0, row, i.query_1), args_.k, i.key_1, args_.v, i.value_1, i.value_2, row);
    const std::vector<double> noise =
        map_times_values(args_.q.at(0, row, i.query_2), args_.k, i.key_2, args_.v, i.value_1, i.value_2, row);
    double squares = 0;
    for (std::size_t c = 0; c < out.size(); ++c) {
      out[c] -= static_cast<double>(args_.lambda.value) * noise[c];
      squares += out[c] * out[c];
    }
    const double rms = std::sqrt(squares / static_cast<double>(out.size()) + static_cast<double>(args_.norm.eps));
    for (double& x : out) x *= static_cast<double>(args_.norm.gain) / rms;
    return out;
  }

  /// The model's own result; 8e-6 is the bound that the data's authors derived for float32 kernels.
  void check_stored_result() const {
    const std::vector<double>& expected = real_data().values("kernel.out");
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (!(difference(out_[i], expected[i]) <= 8e-6)) throw std::runtime_error("stored result of the trained model not met");
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
  std::unique_ptr<Eigen::ThreadPool> pool_;
  std::unique_ptr<Eigen::ThreadPoolDevice> device_;
  unfused<T> unfused_;
  double error_ = 0, unfused_error_ = 0;
};

}  // namespace bench
