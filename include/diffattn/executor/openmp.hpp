// SPDX-License-Identifier: MIT
#pragma once

// Tasks on OpenMP threads. Compile with -fopenmp.

#if !defined(_OPENMP)
#error "diffattn: executor/openmp.hpp needs OpenMP (-fopenmp)"
#endif

#include <omp.h>

#include "../executor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// At most `threads` OpenMP threads. The queue is ours, since `schedule(dynamic)` allocates in LLVM's OpenMP.
class openmp_executor {
 public:
  /// The default is what OpenMP would use. Changes no global setting.
  explicit openmp_executor(int threads = omp_get_max_threads()) noexcept : threads_(threads) {}

  index_t workers() const noexcept { return threads_; }

  template <class F>
  void run(index_t tasks, F&& f) const {
    task_queue queue(tasks);
    // GNU's OpenMP allocates a team of one anew for each region.
    if (threads_ == 1 || tasks <= 1) return queue.work(f, 0);
#pragma omp parallel num_threads(threads_)
    queue.work(f, static_cast<index_t>(omp_get_thread_num()));
  }

 private:
  int threads_;
};

DIFFATTN_NAMESPACE_END
