// SPDX-License-Identifier: MIT
#pragma once

// Tasks on the threads of an Eigen::ThreadPoolDevice that the caller owns. Define EIGEN_USE_THREADS before Eigen's tensor
// header is first included.

#if !defined(EIGEN_USE_THREADS)
#error "diffattn: executor/eigen_thread_pool.hpp needs EIGEN_USE_THREADS defined before any Eigen header"
#endif

#include <unsupported/Eigen/CXX11/Tensor>

#include "../executor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// One closure for each thread but one; the calling thread takes tasks as well, so a pool of n threads gives n workers without
/// leaving the caller idle. Do not call from one of the pool's own threads.
class eigen_executor {
 public:
  explicit eigen_executor(const Eigen::ThreadPoolDevice& device) noexcept : device_(&device) {}

  index_t workers() const noexcept { return device_->numThreads() < 1 ? 1 : device_->numThreads(); }

  template <class F>
  void run(index_t tasks, F&& f) const {
    const index_t helpers = (tasks < workers() ? tasks : workers()) - 1;
    task_queue queue(tasks);
    if (helpers <= 0) return queue.work(f, 0);
    Eigen::Barrier done(static_cast<unsigned>(helpers));
    for (index_t worker = 1; worker <= helpers; ++worker)
      device_->enqueueNoNotification([&queue, &f, &done, worker] {
        queue.work(f, worker);
        done.Notify();
      });
    queue.work(f, 0);
    done.Wait();
  }

 private:
  const Eigen::ThreadPoolDevice* device_;
};

DIFFATTN_NAMESPACE_END
