// SPDX-License-Identifier: MIT
#pragma once

// A golden file as calls of the library. golden_case<T> has the attention call on the stored q, k and v; golden_layer<T>
// (golden_layer.hpp) the whole layer on its hidden states. Both can be run at once and as the authors' caches were fed. What
// does not fit together in a file is thrown.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <diffattn/forward.hpp>
#include <diffattn/kv_cache.hpp>
#include <limits>
#include <list>
#include <string>
#include <vector>

#include "golden_layout.hpp"

namespace test {

using diffattn::key_range;
using diffattn::tensor_view;

/// Some tokens of one batch entry.
template <class T>
tensor_view<T> part(tensor_view<T> x, index_t entry, index_t first, index_t count) {
  x.data = x.at(entry, 0, 0), x.batch = 1;
  return x.token_range(first, count);
}

/// A call on some rows of its queries; of one batch entry, or all of them.
template <class T>
diffattn::forward_args<T> on_rows(diffattn::forward_args<T> a, index_t row, index_t count, index_t entry = -1) {
  const index_t first = std::max(entry, index_t{0});
  if (auto gate = a.lambda.array(); gate.data) {  // all other factors are numbers
    gate.data = &gate.at(first, row, 0);
    a.lambda = diffattn::lambda_view<T>::strided(gate, true);
  }
  a.q = a.q.token_range(row, count), a.out = a.out.token_range(row, count);
  if (entry < 0) return a;
  a.q = part(a.q, entry, 0, count), a.out = part(a.out, entry, 0, count);
  if (a.mask.key_ranges) a.mask.key_ranges += entry;
  return a;
}

/// A cache with its memory.
class golden_cache {
 public:
  explicit golden_cache(const diffattn::kv_cache_config& config) : memory_(kv_cache_bytes(config)) {
    throw_if_error(cache.open(config, memory_.view()));
  }
  diffattn::kv_cache cache;

 private:
  diffattn::owned_workspace memory_;
};

template <class T>
class golden_case : public golden_layout {
 public:
  explicit golden_case(const std::string& path) : golden_layout(path) {
    read_lambda();
    if (file.has("kernel.norm_weight") && !config.norm_weight) throw file.error("affine", "does not go with the tensors");
    if (config.norm_weight) weights.norm = numbers("kernel.norm_weight", {out_width});
    args = to_forward_args(config, weights);
    args.q = tensor("kernel.q", rows, file.integer("n_q_heads", 1), config.head_width);
    args.k = tensor("kernel.k", keys, file.integer("n_k_heads", 1), config.head_width);
    args.v = tensor("kernel.v", keys, file.integer("n_v_heads", 1), config.value_width);
    for (const char* name : {"kernel.out", "kernel.diff"})
      if (file.has(name) || name == std::string(result()))
        file.expect(name, llm::dtype::f64, {batch, rows, out_heads, out_width});
    if (logits_) args.lambda = diffattn::lambda_view<T>::gate(logits_, rows, out_heads);
    if (!ranges.empty()) args.mask.key_ranges = ranges.data();
  }

  diffattn::layer_weights<T> weights;  ///< those that the attention call needs
  diffattn::forward_args<T> args;      ///< the call, without its output; packed sequences are not cut

  const char* result() const { return "kernel.out"; }

  /// A tensor of the file, kept as numbers of type T. Null if it is not there and need not be.
  const T* numbers(const char* name, const std::vector<std::int64_t>& shape, bool optional = false) {
    if (optional && !file.has(name)) return nullptr;
    numbers_.push_back(file.expect(name, llm::dtype::f32, shape).template as<T>());
    return numbers_.back().data();
  }
  tensor_view<const T> tensor(const char* name, index_t tokens, index_t n, index_t width) {
    return diffattn::view(numbers(name, {batch, tokens, n, width}), batch, tokens, n, width);
  }
  index_t heads_width() const { return out_heads * out_width; }

  /// The call on some rows of a sequence.
  diffattn::forward_args<T> call(const golden_sequence& s, index_t row, index_t count, std::vector<T>& out) const {
    diffattn::forward_args<T> a = args;
    a.out = view_of(out);
    a.k = part(a.k, s.entry, s.key, s.keys), a.v = part(a.v, s.entry, s.key, s.keys);
    return on_rows(a, s.row + row, count, s.entry);
  }
  /// All at once: one call, or one for each packed sequence. Sizes `out`.
  std::vector<diffattn::forward_args<T>> calls(std::vector<T>& out) const {
    out.resize(static_cast<std::size_t>(batch * rows * heads_width()));
    std::vector<diffattn::forward_args<T>> all;
    if (is_packed()) {
      for (const golden_sequence& s : sequences) all.push_back(call(s, 0, s.rows, out));
    } else {
      all.push_back(args);
      all[0].out = view_of(out);
    }
    return all;
  }
  std::vector<T> run() const {
    std::vector<T> out;
    for (const diffattn::forward_args<T>& a : calls(out)) forward(a);
    fill_padding(out);
    return out;
  }

  diffattn::kv_cache_config cache_config() const {
    diffattn::kv_cache_config c = to_cache_config(config);
    c.keys = c.values = diffattn::storage_of<T>;
    c.kind = is_paged ? diffattn::kv_cache_kind::paged : diffattn::kv_cache_kind::contiguous, c.page_tokens = 4;
    c.sequences = static_cast<index_t>(sequences.size()), c.capacity = keys;
    return c;
  }
  std::vector<T> replay() const {
    std::vector<T> out;
    calls(out);
    golden_cache memory(cache_config());
    diffattn::kv_cache& cache = memory.cache;
    for_each_piece([&](index_t i, index_t begin, index_t end) {
      const golden_sequence& s = sequences[static_cast<std::size_t>(i)];
      const auto tokens = [&](tensor_view<const T> x, const diffattn::kv_rows& stored) {
        x = part(x, s.entry, s.key + begin, end - begin);
        x.heads = stored.heads;  // a table may leave the last heads unused
        return x;
      };
      throw_if_error(cache.append(i, tokens(args.k, cache.view().keys), tokens(args.v, cache.view().values)));
      const index_t row = std::max(s.row_of(begin), index_t{0}), count = s.row_of(end) - row;
      if (count <= 0) return;
      diffattn::forward_args<T> a = call(s, row, count, out);
      const key_range seen = range(s, end);
      a.k = a.v = {}, a.cache = cache.view(), a.sequences = &i, a.mask.key_ranges = &seen;
      forward(a);
    });
    fill_padding(out);
    return out;
  }

  /// Writes what rows of padding hold: those of a call on them alone. run(queries are zero, ranges) is such a call; without
  /// ranges it has no mask at all.
  template <class Run>
  void fill_padding(std::vector<T>& out, Run&& run) const {
    if (padding == padding_rows::none || padding == padding_rows::unspecified) return;
    const std::vector<key_range> nothing(static_cast<std::size_t>(batch));
    // A finite bias of -FLT_MAX swallows the scores, so all keys weigh the same.
    const std::vector<T> padded = padding == padding_rows::uniform ? run(true, nullptr) : run(false, nothing.data());
    for_padding(out.size(), [&](std::size_t i) { out[i] = padded[i]; });
  }

 private:
  tensor_view<T> view_of(std::vector<T>& out) const { return diffattn::view(out.data(), batch, rows, out_heads, out_width); }

  void fill_padding(std::vector<T>& out) const {
    fill_padding(out, [&](bool zero_queries, const key_range* nothing) {
      std::vector<T> padded(out.size());
      diffattn::forward_args<T> a = args;
      a.out = view_of(padded);
      const std::vector<T> zeros(static_cast<std::size_t>(a.q.batch * a.q.batch_stride));
      if (zero_queries) a.q.data = zeros.data(), a.mask = {};
      a.mask.key_ranges = nothing;
      forward(a);
      return padded;
    });
  }
  /// λ from what it was made of, by the library's rules; it must be the stored one.
  void read_lambda() {
    using diffattn::lambda_rule;
    const bool is_gate = config.lambda == lambda_rule::gate;
    const std::vector<std::int64_t> shape =
        is_gate ? std::vector<std::int64_t>{batch, rows, out_heads} : std::vector<std::int64_t>{1};
    const std::vector<double>& stored = file.expect("kernel.lambda", llm::dtype::f64, shape).values;
    const auto expect = [&](double made, double found, double tolerance) {
      if (!(std::fabs(made - found) <= tolerance))
        throw llm::load_error(file.path(), "tensor \"kernel.lambda\": is not what " + file.text("lambda_kind") + " makes");
    };
    if (is_gate) {
      logits_ = numbers("kernel.lambda_logits", shape);
      for (std::size_t i = 0; i < stored.size(); ++i)
        expect(diffattn::lambda_from_gate(static_cast<double>(logits_[i])), stored[i], 1e-14);
      return;
    }
    if (config.lambda == lambda_rule::scalars) {
      weights.lambda_a = numbers("kernel.lambda_a", {1}), weights.lambda_b = numbers("kernel.lambda_b", {1});
    } else {
      const index_t d = config.head_width;
      weights.lambda_q1 = numbers("kernel.lambda_q1", {d}), weights.lambda_k1 = numbers("kernel.lambda_k1", {d});
      weights.lambda_q2 = numbers("kernel.lambda_q2", {d}), weights.lambda_k2 = numbers("kernel.lambda_k2", {d});
    }
    expect(lambda_of(config, weights), stored[0], 1e-12);
  }

  const T* logits_ = nullptr;
  std::list<std::vector<T>> numbers_;
};

/// The largest |found - expected|; NaN if one is.
template <class T>
double largest_error(const std::vector<T>& found, const std::vector<double>& expected) {
  double largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = std::fabs(static_cast<double>(found[i]) - expected[i]);
    if (std::isnan(error)) return error;
    largest = std::max(largest, error);
  }
  return largest;
}

/// What a float32 result may differ from the stored one. The authors' own code in float32 came as near as ref_f32_…_diff, and
/// another order of the same operations may be some times further off. Where it was lucky, some roundings of the largest result
/// are allowed: 2e-7 (3.4 roundings) of it for each of the stages that follow each other, which is one for the attention call,
/// and three for a layer: projections in, attention, projection out. Never more than what the nearly cancelling case needs.
inline double tolerance_of(const golden_file& f, const std::string& result) {
  const bool is_layer = result == "layer.out";
  const std::string key = is_layer ? "ref_f32_layer_diff" : "ref_f32_kernel_diff";
  const double largest = largest_error(f[result].values, std::vector<double>(f[result].values.size()));
  const double allowed =
      !f.says(key) ? 8e-6 * std::max(1.0, largest) : std::max(4 * f.number(key), (is_layer ? 3 : 1) * 2e-7 * largest);
  return std::min(allowed, 3e-4);
}

}  // namespace test
