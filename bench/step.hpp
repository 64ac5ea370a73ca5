// SPDX-License-Identifier: MIT
#pragma once

// One decode step: a cache that is full, one query of each sequence, and the check that comes before any timing.

#include <cstring>
#include <diffattn/attention.hpp>
#include <diffattn/kv_cache.hpp>
#include <memory>
#include <random>

#include "check.hpp"
#include "harness.hpp"

namespace bench {

using diffattn::storage;

inline const char* name(storage type) {
  constexpr const char* names[] = {"f64", "f32", "f16", "bf16", "int8", "q6"};
  return names[static_cast<int>(type)];
}

/// `heads` differential heads; standard attention has twice as many, each of width d, and the same bytes of cache.
struct step_shape {
  storage type = storage::f32;
  index_t heads = 8, kv_heads = 8, d = 64, kv = 1024, batch = 1;
  int threads = 1;
  bool differential = true;

  std::string name() const {
    return std::string("decode/") + (differential ? "differential/" : "standard/") + cache_name(true);
  }
  /// What is in the cache, or, in full, who reads it.
  std::string cache_name(bool full = false) const {
    std::string s = bench::name(type);
    const auto add = [&s](const char* key, index_t value) { s += std::string("/") + key + ":" + std::to_string(value); };
    if (full) add("heads", heads);
    add("kv_heads", kv_heads), add("d", d), add("kv", kv), add("batch", batch);
    full ? add("threads", threads) : add("differential", differential);
    return s;
  }

  diffattn::head_map map() const {
    return differential ? diffattn::head_map::interleaved(heads, kv_heads)
                        : diffattn::head_map::single(2 * heads, 2 * kv_heads);
  }
  index_t outputs() const { return differential ? heads : 2 * heads; }
  index_t value_heads() const { return differential ? kv_heads : 2 * kv_heads; }
  index_t value_width() const { return differential ? 2 * d : d; }

  /// Keys and values, scales included, that one step must read.
  index_t bytes() const {
    return batch * kv *
           (2 * kv_heads * diffattn::row_bytes(type, d) + value_heads() * diffattn::row_bytes(type, value_width()));
  }
  diffattn::kv_cache_config cache() const {
    diffattn::kv_cache_config c;
    c.heads = map(), c.key_width = d, c.value_width = value_width();
    c.keys = c.values = type;
    c.sequences = batch, c.capacity = kv;
    return c;
  }
};

/// The memory that all steps share: each finds its cache in it, or fills it. Pages are as the system gives them, 4 KiB where
/// large ones have to be asked for, and the same for steps and readings.
class shared_cache {
 public:
  /// Tokens of random data; longer caches repeat them.
  static constexpr index_t block = 4096;

  static shared_cache& get() {
    static shared_cache one;
    return one;
  }
  /// To be called for all shapes before the first is filled.
  void reserve(const step_shape& s) {
    bytes_ = std::max(bytes_, diffattn::kv_cache_bytes(s.cache()));
    numbers_ = std::max(numbers_, static_cast<std::size_t>(std::min(s.kv, block) * 2 * s.kv_heads * s.d));
  }

  /// Independent normal numbers, before they are stored.
  diffattn::tensor_view<const float> keys(const step_shape& s) const {
    return tokens(diffattn::view<const float>(keys_.data(), 1, std::min(s.kv, block), 2 * s.kv_heads, s.d), s.batch);
  }
  diffattn::tensor_view<const float> values(const step_shape& s) const {
    return tokens(diffattn::view<const float>(values_.data(), 1, std::min(s.kv, block), s.value_heads(), s.value_width()),
                  s.batch);
  }

  diffattn::kv_view fill(const step_shape& s) {
    if (keys_.empty()) allocate();
    if (filled_ != s.cache_name()) append(s);
    diffattn::kv_view view = cache_.view();
    view.heads = s.map();  // steps with other numbers of query heads read the same cache
    return view;
  }

 private:
  void append(const step_shape& s) {
    filled_.clear();
    diffattn::throw_if_error(cache_.open(s.cache(), {memory_.get(), bytes_}));
    diffattn::tensor_view<const float> k = keys(s), v = values(s);
    for (index_t rest = s.kv; rest > 0; rest -= k.tokens) {
      k.tokens = v.tokens = std::min(rest, block);
      diffattn::throw_if_error(cache_.append(k, v));
    }
    filled_ = s.cache_name();
  }
  /// All sequences have the same tokens.
  static diffattn::tensor_view<const float> tokens(diffattn::tensor_view<const float> one, index_t batch) {
    one.batch = batch, one.batch_stride = 0;
    return one;
  }
  void allocate() {
    memory_.reset(new unsigned char[bytes_]);
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    for (std::vector<float>* x : {&keys_, &values_}) {
      x->resize(numbers_);
      for (float& e : *x) e = normal(random);
    }
  }

  std::size_t bytes_ = 0, numbers_ = 0;
  std::unique_ptr<unsigned char[]> memory_;
  std::vector<float> keys_, values_;
  diffattn::kv_cache cache_;
  std::string filled_;
};

/// Errors against double arithmetic on the data before it was stored, without the norm, in units of the output's rms.
struct storage_error {
  double max = 0, rms = 0;
};

class step {
 public:
  step(const step_shape& s, team* threads) : shape_(s), team_(s.threads > 1 ? threads : nullptr) {
    const index_t width = s.value_width();
    q_.resize(static_cast<std::size_t>(s.batch * 2 * s.heads * s.d));
    out_.resize(static_cast<std::size_t>(s.batch * s.outputs() * width));
    std::mt19937_64 random(2);
    std::normal_distribution<float> normal;
    for (float& e : q_) e = normal(random);
    args_.q = diffattn::view<const float>(q_.data(), s.batch, 1, 2 * s.heads, s.d);
    args_.out = diffattn::view(out_.data(), s.batch, 1, s.outputs(), width);
    args_.mask.causal = true;
    args_.cache = shared_cache::get().fill(s);
    args_.heads = s.map(), args_.lambda = lambda;
    standard_.q = args_.q, standard_.out = args_.out, standard_.mask = args_.mask, standard_.cache = args_.cache;
    scratch_.resize(s.differential ? diffattn::workspace_bytes(args_, s.threads)
                                   : diffattn::workspace_bytes(standard_, s.threads));
  }

  void run() {
    const diffattn::workspace w{scratch_.data(), scratch_.size()};
    const auto call = [&](const auto& executor) {
      return shape_.differential ? forward(args_, w, executor) : attention(standard_, w, executor);
    };
    diffattn::throw_if_error(team_ ? call(team_->executor()) : call(diffattn::serial_executor{}));
  }

  /// The stored bytes, keys before values.
  const unsigned char* stored() const { return static_cast<const unsigned char*>(args_.cache.keys.data); }

  /// Runs the step and compares its first and last head with the naive reference on the numbers of the cache.
  void check() {
    run();
    const auto& cache = args_.cache;
    for (const auto& [b, h] : {std::pair<index_t, index_t>{0, 0}, {shape_.batch - 1, shape_.outputs() - 1}}) {
      const diffattn::head_indices i = shape_.map()[h];
      const std::vector<float> k = numbers(cache.keys, b, {i.key_1, i.key_2}), v = numbers(cache.values, b, {i.value_1});
      const index_t d = shape_.d, width = shape_.value_width();
      reference::problem<float> p = reference_problem(args_.q.at(b, 0, 0), reference::norm::rms);
      p.heads = {{{i.query_1, i.query_2}, {0, 1}, 0, -1}};
      p.k = {k.data(), 0, d, shape_.kv * d};
      p.v = {v.data(), 0, width, 0};
      checked_error(args_.out.at(b, 0, h), width, reference::attention(p).out, 0, shape_.name());
    }
  }

  storage_error error() {
    args_.norm = diffattn::head_norm<float>::none();
    run();
    reference::problem<float> p = reference_problem(q_.data(), reference::norm::none);
    p.k = reference_tensor(shared_cache::get().keys(shape_)), p.v = reference_tensor(shared_cache::get().values(shape_));
    for (index_t h = 0; h < shape_.outputs(); ++h) {
      const diffattn::head_indices i = shape_.map()[h];
      p.heads.push_back({{i.query_1, i.query_2}, {i.key_1, i.key_2}, i.value_1, -1});
    }
    const std::vector<double> expected = reference::attention(p).out.value;
    double squares = 0, error_squares = 0, largest = 0;
    for (std::size_t e = 0; e < expected.size(); ++e) {
      const double error = std::fabs(static_cast<double>(out_[e]) - expected[e]);
      squares += expected[e] * expected[e], error_squares += error * error, largest = std::max(largest, error);
    }
    args_.norm = {};
    return {largest / std::sqrt(squares / static_cast<double>(expected.size())), std::sqrt(error_squares / squares)};
  }

 private:
  static constexpr float lambda = 0.36f;

  /// Rows of a cache, [heads][tokens][width].
  std::vector<float> numbers(const diffattn::kv_rows& rows, index_t b, const std::vector<index_t>& heads) const {
    std::vector<float> x(heads.size() * static_cast<std::size_t>(shape_.kv * rows.width));
    float* to = x.data();
    for (const index_t h : heads)
      for (index_t t = 0; t < shape_.kv; ++t, to += rows.width)
        diffattn::simd::decode_row(rows.type, rows.at(args_.cache.page(b, t), h, t), rows.width, to);
    return x;
  }

  /// Without keys, values and heads.
  reference::problem<float> reference_problem(const float* q, reference::norm kind) const {
    reference::problem<float> p;
    p.q_len = 1, p.kv_len = shape_.kv, p.d = shape_.d, p.dv = shape_.value_width();
    p.q = {q, 0, 0, shape_.d};
    p.scale = 1 / std::sqrt(static_cast<double>(shape_.d));
    p.factor[0].assign(static_cast<std::size_t>(shape_.outputs()), 1.0);
    p.factor[1].assign(static_cast<std::size_t>(shape_.outputs()), shape_.differential ? static_cast<double>(lambda) : 0.0);
    if (shape_.differential) p.kind = kind, p.eps = static_cast<double>(args_.norm.eps);
    return p;
  }

  step_shape shape_;
  team* team_;
  std::vector<float> q_, out_;
  diffattn::forward_args<float> args_;
  diffattn::attention_args<float> standard_;
  std::vector<unsigned char> scratch_;
};

}  // namespace bench
