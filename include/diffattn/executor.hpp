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

DIFFATTN_NAMESPACE_END
