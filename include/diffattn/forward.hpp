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

DIFFATTN_ISA_NAMESPACE_BEGIN

/// The call itself, for arguments that `check` accepts: one map (standard attention) or two.
template <int Maps, class T, class Executor>
inline status run(const forward_args<T>& args, workspace scratch, Executor& executor) noexcept {
  const index_t workers = executor.workers();
  if (const status s = checks::workers(workers); s != status::ok) return s;
  if (const status s = checks::memory(args, scratch, schedule::panels_bytes<Maps>(args, workers)); s != status::ok) return s;
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
  return valid ? schedule::panels_bytes<2>(args, workers) : 0;
}

/// Computes args.out. Serial unless an executor is given. Masked keys and values are not read into any sum; a row that may see
/// no key gives 0 and log-sum-exp −∞; NaN in live input reaches its row and head and no other. Results are the same, bit for
/// bit, for every executor, batch size and division of the queries into calls.
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
