// SPDX-License-Identifier: MIT
#pragma once

// A whole attention layer of any family: hidden states in, hidden states out.
//
//   status      check(args)                          is the call meaningful?
//   size_t      workspace_bytes(args, workers = 1)   scratch memory it needs   [, kv_len]: while no sequence grows past kv_len
//   status      forward(args, workspace, executor)   projections, rotation, cache, attention, output projection

#include "../forward.hpp"
#include "layer_check.hpp"
#include "projection.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace layers {

/// Where the intermediate results of a layer lie in the workspace.
template <class T>
struct buffers {
  T *q = nullptr, *k = nullptr, *v = nullptr, *heads = nullptr;
  T *lambda = nullptr, *alpha = nullptr, *gate = nullptr;
  T* lanes = nullptr;             ///< for the norms of rows
  index_t* positions = nullptr;   ///< [batch] of the first token
  unsigned char* rest = nullptr;  ///< of the attention call
};

template <class T>
inline buffers<T> carve(const layer_args<T>& a, const sizes& n, std::size_t attention_bytes, arena& memory) noexcept {
  const layer_config& c = a.config;
  const std::size_t rows = static_cast<std::size_t>(a.x.batch * a.x.tokens);
  const auto rows_of = [&](index_t channels) { return memory.take<T>(static_cast<std::size_t>(channels), rows); };
  buffers<T> b;
  b.q = rows_of(n.query_channels(c)), b.k = rows_of(n.key_channels(c)), b.v = rows_of(n.value_channels(c));
  b.heads = rows_of(n.out_channels(c));
  b.lambda = rows_of(n.lambda_channels(c)), b.alpha = rows_of(n.alpha_channels(c)), b.gate = rows_of(n.gate_channels(c));
  index_t widest = c.scale_norm != norm_kind::none ? n.out_channels(c) : 0;
  if (c.qk_norm != norm_kind::none && c.head_width > widest) widest = c.head_width;
  b.lanes = memory.take<T>(static_cast<std::size_t>(widest), static_cast<std::size_t>(simd::lanes<T>));
  b.positions = memory.take<index_t>(static_cast<std::size_t>(a.x.batch));
  b.rest = memory.take<unsigned char>(attention_bytes);
  return b;
}

/// The attention call of a layer, on the keys as they are when it is built.
template <class T>
inline forward_args<T> attention_call(const layer_args<T>& a, const sizes& n, const buffers<T>& b) noexcept {
  const layer_config& c = a.config;
  forward_args<T> call = to_forward_args(c, a.weights);
  call.q = view<const T>(b.q, a.x.batch, a.x.tokens, n.heads.queries, c.head_width);
  call.out = view(b.heads, a.x.batch, a.x.tokens, c.heads.heads, n.out_width(c));
  if (a.cache || c.keys == key_source::borrowed) {
    call.cache = a.cache ? a.cache->view() : a.keys_and_values;
    call.sequences = a.sequences;
  } else {
    call.k = view<const T>(b.k, a.x.batch, a.x.tokens, n.heads.keys, c.head_width);
    call.v = view<const T>(b.v, a.x.batch, a.x.tokens, n.heads.values, c.value_width);
  }
  if (c.lambda == lambda_rule::gate) call.lambda = lambda_view<T>::gate(b.lambda, a.x.tokens, c.heads.heads);
  if (c.alpha_gate) call.alpha = lambda_view<T>::gate(b.alpha, a.x.tokens, c.heads.heads);
  call.mask.key_ranges = a.key_ranges;
  return call;
}

/// Bytes of the attention call when no sequence holds more than kv_len tokens.
template <class T>
inline std::size_t attention_bytes(const layer_args<T>& a, const sizes& n, index_t workers, index_t kv_len) noexcept {
  forward_args<T> call = attention_call(a, n, buffers<T>());
  if (call.cache.is_given()) call = schedule::with_length(call, kv_len);
  return a.config.lambda == lambda_rule::none ? bytes_needed<1>(call, workers) : bytes_needed<2>(call, workers);
}

/// Normalises `count` rows of n numbers in place.
template <class T>
inline void norm_rows(T* rows, index_t count, index_t n, norm_kind kind, double eps, const linear<T>& w, T* lanes) noexcept {
  if (kind == norm_kind::none) return;
  head_norm<T> norm;
  norm.kind = kind, norm.eps = static_cast<T>(eps), norm.weight = w.weight, norm.bias = w.bias;
  T ones[simd::lanes<T>];
  for (T& one : ones) one = T(1);
  constexpr index_t w_lanes = simd::lanes<T>;
  for (index_t i = 0; i < count; i += w_lanes)
    kernel::normalise_rows(rows + i * n, n, count - i < w_lanes ? count - i : w_lanes, n, ones, norm, lanes);
}

template <class T>
inline rows_of<T> rows_of_tokens(const tensor_view<T>& x) noexcept {
  return {x.data, x.tokens > 1 ? x.token_stride : x.batch > 1 ? x.batch_stride : x.width};
}

}  // namespace layers

/// Bytes of workspace while no sequence of its cache, or of the borrowed keys, holds more than `kv_len` tokens after the call:
/// what a loop over tokens allocates once. 0 if the arguments are wrong.
template <class T>
inline std::size_t workspace_bytes(const layer_args<T>& args, index_t workers, index_t kv_len) noexcept {
  layers::sizes n;
  if (layers::check(args, n) != status::ok || checks::workers(workers) != status::ok) return 0;
  const index_t heads = n.heads.queries + n.heads.keys + n.heads.values;
  const index_t channels = args.config.head_width + args.config.value_width;
  if (kv_len < 0 || checks::capped_product(checks::capped_product(kv_len, channels), heads) >= checks::limit / 64) return 0;
  arena counter;
  layers::carve(args, n, layers::attention_bytes(args, n, workers, kv_len), counter);
  return counter.bytes();
}

/// Bytes of workspace for this call; 0 if the arguments are wrong or nothing is to be done.
template <class T>
inline std::size_t workspace_bytes(const layer_args<T>& args, index_t workers = 1) noexcept {
  const bool valid = check(args) == status::ok && args.x.batch > 0 && args.x.tokens > 0;
  return valid ? workspace_bytes(args, workers, layers::longest(args)) : 0;
}

/// Computes args.out. After any status but ok neither out nor the cache has changed. Serial unless an executor is given; the
/// same bits for every executor. Errors: those of `check`, the workspace's, and those of the cache: cache_full, cache_no_page,
/// cache_sequence for one sequence twice.
template <class T, class Executor = serial_executor>
inline status forward(const layer_args<T>& args, workspace scratch, Executor&& executor = Executor{}) noexcept {
  const layer_config& c = args.config;
  const layer_weights<T>& w = args.weights;
  layers::sizes n;
  if (const status s = layers::check(args, n); s != status::ok) return s;
  const index_t workers = executor.workers(), rows = args.x.batch * args.x.tokens;
  if (const status s = checks::workers(workers); s != status::ok) return s;
  if (rows == 0) return status::ok;
  const std::size_t inner = layers::attention_bytes(args, n, workers, layers::longest(args));
  arena counter;
  layers::carve(args, n, inner, counter);
  if (const status s = layers::memory(args, n, scratch, counter.bytes()); s != status::ok) return s;
  arena memory(scratch.data);
  const layers::buffers<T> b = layers::carve(args, n, inner, memory);

  const index_t q = n.query_channels(c), k = n.key_channels(c), v = n.value_channels(c), heads = n.out_channels(c);
  const index_t lambdas = n.lambda_channels(c), alphas = n.alpha_channels(c), gates = n.gate_channels(c);
  layers::project<T>(layers::rows_of_tokens(args.x), rows, c.model_width,
                     {{w.q, q, {b.q, q}},
                      {w.k, k, {b.k, k}},
                      {w.v, v, {b.v, v}},
                      {w.lambda_gate, lambdas, {b.lambda, lambdas}},
                      {w.alpha_gate, alphas, {b.alpha, alphas}},
                      {w.output_gate, gates, {b.gate, gates}}},
                     executor);
  layers::norm_rows(b.q, rows * n.heads.queries, c.head_width, c.qk_norm, c.qk_norm_eps, w.q_norm, b.lanes);
  if (k > 0) layers::norm_rows(b.k, rows * n.heads.keys, c.head_width, c.qk_norm, c.qk_norm_eps, w.k_norm, b.lanes);

  const tensor_view<T> queries = view(b.q, args.x.batch, args.x.tokens, n.heads.queries, c.head_width);
  const tensor_view<T> keys = view(b.k, args.x.batch, args.x.tokens, n.heads.keys, c.head_width);
  const tensor_view<T> values = view(b.v, args.x.batch, args.x.tokens, n.heads.values, c.value_width);
  if (c.rotates) {
    for (index_t e = 0; e < args.x.batch; ++e) b.positions[e] = layers::first_position(args, e);
    if (const status s = rotate(args.rope, queries, queries, 0, b.positions); s != status::ok) return s;
    if (k > 0)
      if (const status s = rotate(args.rope, keys, keys, 0, b.positions); s != status::ok) return s;
  }
  if (args.cache)
    if (const status s = args.cache->append(keys, values, args.sequences); s != status::ok) return s;

  const forward_args<T> call = layers::attention_call(args, n, b);
  const workspace rest{b.rest, inner};
  status s = check(call);
  if (s == status::ok) s = c.lambda == lambda_rule::none ? run<1>(call, rest, executor) : run<2>(call, rest, executor);
  if (s != status::ok) return s;

  if (c.output_gate) layers::apply_gate(b.heads, b.gate, rows * heads);
  layers::norm_rows(b.heads, rows, heads, c.scale_norm, c.scale_norm_eps, w.scale_norm, b.lanes);
  layers::project<T>({b.heads, heads}, rows, heads, {{w.out, c.model_width, layers::rows_of_tokens(args.out)}}, executor);
  return status::ok;
}

/// The same with scratch memory of its own, on this thread; throws std::invalid_argument.
template <class T>
inline void forward(const layer_args<T>& args) {
  throw_if_error(check(args));
  const owned_workspace scratch(workspace_bytes(args));
  throw_if_error(forward(args, scratch.view()));
}

DIFFATTN_ISA_NAMESPACE_END
