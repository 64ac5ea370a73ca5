// SPDX-License-Identifier: MIT
#pragma once

// Tasks on OpenMP threads. Compile with -fopenmp.

#if !defined(_OPENMP)
#error "diffattn: executor/openmp.hpp needs OpenMP (-fopenmp)"
#endif

#include <omp.h>

#include "../tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// Tasks are handed out one at a time, since under a causal mask they differ in cost.
class openmp_executor {
 public:
  /// At most `threads` threads; the default is what OpenMP would use. Changes no global setting.
  explicit openmp_executor(int threads = omp_get_max_threads()) noexcept : threads_(threads) {}

  index_t workers() const noexcept { return threads_; }

  template <class F>
  void run(index_t tasks, F&& f) const {
    // A team of one is allocated anew for each region.
    if (threads_ == 1 || tasks <= 1) {
      for (index_t task = 0; task < tasks; ++task) f(task, index_t{0});
      return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_)
    for (index_t task = 0; task < tasks; ++task) f(task, static_cast<index_t>(omp_get_thread_num()));
  }

 private:
  int threads_;
};

DIFFATTN_NAMESPACE_END
