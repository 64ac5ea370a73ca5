// SPDX-License-Identifier: MIT
#pragma once

// Standard attention by the same kernels: one map, no norm. The calls mirror those of forward.hpp.

#include "forward.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace checks {

/// Standard attention as the one-map case: λ = 0 and no norm.
template <class T>
DIFFATTN_INLINE forward_args<T> one_map(const attention_args<T>& a) noexcept {
  forward_args<T> f;
  f.q = a.q, f.k = a.k, f.v = a.v, f.out = a.out;
  f.cache = a.cache, f.sequences = a.sequences, f.schedule = a.schedule;
  f.heads = head_map::single(a.out.heads, a.cache.is_given() ? a.cache.keys.heads : a.k.heads);
  f.lambda = compute_type<T>(0);
  f.norm = head_norm<compute_type<T>>::none();
  f.mask = a.mask, f.logits = a.logits, f.scale = a.scale, f.lse1 = a.lse;
  return f;
}

}  // namespace checks

/// The first thing wrong with the arguments, or ok.
template <class T>
inline status check(const attention_args<T>& args) noexcept {
  return checks::arguments(checks::one_map(args));
}

/// Bytes of workspace for an executor with `workers` workers; 0 if the arguments are wrong.
template <class T>
inline std::size_t workspace_bytes(const attention_args<T>& args, index_t workers = 1) noexcept {
  const bool valid = checks::workers(workers) == status::ok && check(args) == status::ok;
  return valid ? bytes_needed<1>(checks::one_map(args), workers) : 0;
}

/// Bytes of workspace for a call like this one while no sequence of its cache holds more than `kv_len` tokens: what a loop over
/// tokens allocates once. 0 if the arguments are wrong.
template <class T>
inline std::size_t workspace_bytes(const attention_args<T>& args, index_t workers, index_t kv_len) noexcept {
  const bool valid = checks::workers(workers) == status::ok && check(args) == status::ok &&
                     checks::length_is_possible(checks::one_map(args), kv_len);
  return valid ? bytes_needed<1>(schedule::with_length(checks::one_map(args), kv_len), workers) : 0;
}

/// Computes args.out; see `forward` in forward.hpp for the promises.
template <class T, class Executor = serial_executor>
inline status attention(const attention_args<T>& args, workspace scratch, Executor&& executor = Executor{}) noexcept {
  if (const status s = check(args); s != status::ok) return s;
  return run<1>(checks::one_map(args), scratch, executor);
}

/// As above with scratch memory of its own; throws std::invalid_argument.
template <class T>
inline void attention(const attention_args<T>& args) {
  throw_if_error(check(args));
  const owned_workspace scratch(workspace_bytes(args));
  throw_if_error(attention(args, scratch.view()));
}

DIFFATTN_ISA_NAMESPACE_END
