// SPDX-License-Identifier: MIT
#pragma once

// The public calls behind ordinary functions, so that the kernels are compiled once for all tests and not in every file.

#include <diffattn/arguments.hpp>
#include <diffattn/executor.hpp>
#include <diffattn/status.hpp>
#include <diffattn/workspace.hpp>
#include <vector>

namespace test {

/// An executor chosen at run time.
class any_executor {
 public:
  using task_function = void (*)(void* context, diffattn::index_t task, diffattn::index_t worker);
  any_executor() = default;
  any_executor(const any_executor&) = delete;
  any_executor& operator=(const any_executor&) = delete;
  virtual ~any_executor() = default;

  virtual diffattn::index_t workers() const noexcept = 0;
  virtual void run_tasks(diffattn::index_t tasks, task_function f, void* context) = 0;

  template <class F>
  void run(diffattn::index_t tasks, F&& f) {
    run_tasks(
        tasks,
        [](void* context, diffattn::index_t task, diffattn::index_t worker) { (*static_cast<F*>(context))(task, worker); }, &f);
  }
};

// Args is forward_args, attention_args, merge_args or merge_attention_args of float, double, f16 or bf16.

template <class Args>
diffattn::status check(const Args& args);

template <class Args>
std::size_t workspace_bytes(const Args& args, diffattn::index_t workers = 1);

/// Not for merging.
template <class Args>
std::size_t workspace_bytes(const Args& args, diffattn::index_t workers, diffattn::index_t kv_len);

/// forward, attention or merge, by the type of the arguments.
template <class Args>
diffattn::status run(const Args& args, diffattn::workspace scratch, any_executor& executor);

/// Serial, in a workspace that is exactly large enough, not aligned, full of NaN before the call and guarded behind its end.
template <class Args>
diffattn::status run(const Args& args);

}  // namespace test
