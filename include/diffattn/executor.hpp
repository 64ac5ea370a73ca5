// SPDX-License-Identifier: MIT
#pragma once

// Who runs the tasks of a call. An executor is any object with
//
//   index_t workers() const noexcept;
//   template <class F> void run(index_t tasks, F&& f);
//
// run calls f(task, worker) once for every task in [0, tasks), in any order, at most one at a time for each worker in
// [0, workers()), and returns when all are done. It is never called from inside a task. Results do not depend on it, bit for
// bit. Adapters: executor/eigen_thread_pool.hpp, executor/openmp.hpp.

#include <atomic>

#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// Everything on the calling thread.
struct serial_executor {
  DIFFATTN_INLINE index_t workers() const noexcept { return 1; }
  template <class F>
  DIFFATTN_INLINE void run(index_t tasks, F&& f) const {
    for (index_t task = 0; task < tasks; ++task) f(task, index_t{0});
  }
};

/// Tasks handed out one at a time to the workers that ask: what executors of any thread pool have in common. Under a causal
/// mask tasks differ in cost, so an equal share each would leave workers idle.
class task_queue {
 public:
  DIFFATTN_INLINE explicit task_queue(index_t tasks) noexcept : tasks_(tasks) {}

  /// Runs f(task, worker) until no task is left. Call it once on each worker's thread.
  template <class F>
  DIFFATTN_INLINE void work(F& f, index_t worker) {
    for (index_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) f(task, worker);
  }

 private:
  index_t tasks_;
  std::atomic<index_t> next_{0};
};

DIFFATTN_NAMESPACE_END
