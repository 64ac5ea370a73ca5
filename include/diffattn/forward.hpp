// SPDX-License-Identifier: MIT
#pragma once

// Differential attention: the public call.
//
//   status      check(args)                          is the call meaningful?
//   size_t      workspace_bytes(args, workers = 1)   scratch memory it needs
//   status      forward(args, workspace, executor)   run it: no allocation, no exception, no thread but the executor's
//   void        forward(args)                        the same with scratch memory of its own, on this thread; throws

#include "check.hpp"
#include "executor.hpp"
#include "schedule/panels.hpp"
#include "schedule/stream.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN

/// Queries of a sequence up to which a call streams, however many heads share a key: 8, or 4 in double. With more, the panels'
/// registers are full enough to repay the packing (16 float queries: panels take 0.6 to 0.9 of the time, 8: 1.0 to 2.5).
template <class T>
inline constexpr index_t stream_queries = 32 / sizeof(compute_type<T>);

template <class T>
inline bool streams(const forward_args<T>& args) noexcept {
  return args.schedule == schedule_choice::stream ||
         (args.schedule == schedule_choice::automatic && args.q.tokens <= stream_queries<T>);
}

/// Workspace of a call that `check` accepts: one map (standard attention) or two.
template <int Maps, class T>
inline std::size_t bytes_needed(const forward_args<T>& args, index_t workers) noexcept {
  return streams(args) ? schedule::stream_bytes<Maps>(args, workers) : schedule::panels_bytes<Maps>(args, workers);
}

/// The call itself.
template <int Maps, class T, class Executor>
inline status run(const forward_args<T>& args, workspace scratch, Executor& executor) noexcept {
  const index_t workers = executor.workers();
  if (const status s = checks::workers(workers); s != status::ok) return s;
  if (const status s = checks::memory(args, scratch, bytes_needed<Maps>(args, workers)); s != status::ok) return s;
  if (streams(args))
    schedule::run_stream<Maps>(args, scratch, executor, workers);
  else
    schedule::run_panels<Maps>(args, scratch, executor, workers);
  return status::ok;
}

/// The first thing wrong with the arguments, or ok. Reads no tensor element.
template <class T>
inline status check(const forward_args<T>& args) noexcept {
  return checks::arguments(args);
}

/// Bytes of workspace for an executor with `workers` workers, exactly; 0 if the arguments are wrong or nothing is to be done.
template <class T>
inline std::size_t workspace_bytes(const forward_args<T>& args, index_t workers = 1) noexcept {
  const bool valid = checks::workers(workers) == status::ok && check(args) == status::ok;
  return valid ? bytes_needed<2>(args, workers) : 0;
}

/// Bytes of workspace for a call like this one while no sequence of its cache holds more than `kv_len` tokens: what a loop over
/// tokens allocates once. 0 if the arguments are wrong.
template <class T>
inline std::size_t workspace_bytes(const forward_args<T>& args, index_t workers, index_t kv_len) noexcept {
  const bool valid =
      checks::workers(workers) == status::ok && check(args) == status::ok && checks::length_is_possible(args, kv_len);
  return valid ? bytes_needed<2>(schedule::with_length(args, kv_len), workers) : 0;
}

/// Computes args.out. Serial unless an executor is given. Masked keys and values are not read into any sum; a row that may see
/// no key gives 0 (before a norm's bias) and, without a sink, log-sum-exp −∞; NaN in live input reaches its row and head and no
/// other. Results are the same, bit for bit, for every executor, batch size, kind of cache and, within one schedule, division
/// of the queries into calls.
template <class T, class Executor = serial_executor>
inline status forward(const forward_args<T>& args, workspace scratch, Executor&& executor = Executor{}) noexcept {
  if (const status s = check(args); s != status::ok) return s;
  return run<2>(args, scratch, executor);
}

/// As above with scratch memory of its own. Throws std::invalid_argument with the message of the status.
template <class T>
inline void forward(const forward_args<T>& args) {
  throw_if_error(check(args));
  const owned_workspace scratch(workspace_bytes(args));
  throw_if_error(forward(args, scratch.view()));
}

DIFFATTN_ISA_NAMESPACE_END
