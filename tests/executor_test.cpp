// SPDX-License-Identifier: MIT
// The result does not depend on who runs the tasks, in which order and by how many workers: bit for bit.

#define EIGEN_USE_THREADS

#include <gtest/gtest.h>

#include <atomic>
#include <diffattn/attention.hpp>
#include <diffattn/executor/eigen_thread_pool.hpp>
#if defined(_OPENMP)
#include <diffattn/executor/openmp.hpp>
#endif
#include <numeric>
#include <random>
#include <vector>

#include "support/problem.hpp"

namespace {

using diffattn::index_t;
using diffattn::schedule_choice;
using diffattn::status;
using test::problem;
using test::spec;

/// One thread, tasks in a shuffled order, each by some worker: nothing may be left over from the task before.
class shuffled_executor {
 public:
  shuffled_executor(index_t workers, unsigned seed) : workers_(workers), engine_(seed) {}
  index_t workers() const noexcept { return workers_; }
  template <class F>
  void run(index_t tasks, F&& f) {
    std::vector<index_t> order(static_cast<std::size_t>(tasks));
    std::iota(order.begin(), order.end(), index_t{0});
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[engine_() % i]);
    for (const index_t task : order) f(task, static_cast<index_t>(engine_() % static_cast<unsigned long>(workers_)));
  }

 private:
  index_t workers_;
  std::mt19937 engine_;
};

struct reversed_executor {
  index_t workers() const noexcept { return 2; }
  template <class F>
  void run(index_t tasks, F&& f) const {
    for (index_t task = tasks; task-- > 0;) f(task, task % 2);
  }
};

/// Checks the executor's own promise: each task once, workers within range and never twice at a time.
template <class Executor>
void expect_runs_each_task_once(Executor&& executor) {
  for (const index_t tasks : {index_t{0}, index_t{1}, index_t{2}, index_t{7}, index_t{1000}}) {
    std::vector<std::atomic<int>> count(static_cast<std::size_t>(tasks)), busy(static_cast<std::size_t>(executor.workers()));
    std::atomic<bool> wrong{false};
    executor.run(tasks, [&](index_t task, index_t worker) {
      if (worker < 0 || worker >= executor.workers()) {
        wrong = true;
        return;
      }
      if (busy[static_cast<std::size_t>(worker)]++ != 0) wrong = true;
      ++count[static_cast<std::size_t>(task)];
      --busy[static_cast<std::size_t>(worker)];
    });
    EXPECT_FALSE(wrong);
    for (const std::atomic<int>& c : count) EXPECT_EQ(c, 1);
  }
}

template <class T, class Executor>
std::vector<T> outputs(const spec& s, Executor&& executor, schedule_choice schedule = schedule_choice::panels) {
  problem<T> p(s);
  p.args().schedule = schedule;
  std::vector<unsigned char> memory(diffattn::workspace_bytes(p.args(), executor.workers()), 0xff);
  EXPECT_EQ(diffattn::forward(p.args(), {memory.data(), memory.size()}, executor), status::ok);
  std::vector<T> all = p.out.values();
  for (const test::tensor<T>* t : {&p.out1, &p.lse2}) {
    const std::vector<T> more = t->values();
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

std::vector<spec> specs() {
  std::vector<spec> all;
  for (const bool causal : {false, true})
    for (const test::family f : {test::family::interleaved, test::family::halves, test::family::table}) {
      spec s;
      s.batch = 3, s.q_len = 197, s.kv_len = 300, s.d = 8, s.width = 7, s.heads_family = f, s.heads = 4,
      s.kv = f == test::family::table ? 4 : 2;
      s.causal = causal, s.ranges = true, s.norm = diffattn::norm_kind::rms, s.q_amplitude = 5;
      all.push_back(s);
      s.window = causal ? 33 : s.window, s.q_len = 1, s.batch = 40;
      all.push_back(s);
    }
  return all;
}

/// Few units and many keys: the parts of a sequence are dealt out; many units: whole units are.
std::vector<spec> decode_specs() {
  std::vector<spec> all;
  const auto add = [&all](index_t batch, index_t q_len, index_t kv_len, index_t window) {
    spec s;
    s.batch = batch, s.q_len = q_len, s.kv_len = kv_len, s.window = window, s.causal = true;
    s.d = 5, s.width = 7, s.heads = 4, s.kv = 2, s.norm = diffattn::norm_kind::rms, s.q_amplitude = 5, s.ranges = batch == 3;
    all.push_back(s);
  };
  add(1, 1, 700, diffattn::attention_mask::unlimited), add(1, 4, 6000, diffattn::attention_mask::unlimited);
  add(1, 2, 6000, 1500), add(3, 4, 2300, diffattn::attention_mask::unlimited);
  add(30, 1, 1025, diffattn::attention_mask::unlimited);
  return all;
}

template <class T>
struct Executors : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Executors, types);

TYPED_TEST(Executors, AllGiveTheSame) {
  for (const spec& s : specs()) {
    SCOPED_TRACE(s.text());
    const std::vector<TypeParam> serial = outputs<TypeParam>(s, diffattn::serial_executor());
    EXPECT_TRUE(test::identical(outputs<TypeParam>(s, reversed_executor()), serial)) << "reversed";
    for (const index_t workers : {1, 2, 5, 64})
      EXPECT_TRUE(test::identical(outputs<TypeParam>(s, shuffled_executor(workers, 7)), serial)) << workers << " shuffled";
    for (const int threads : {1, 2, 3}) {
      Eigen::ThreadPool pool(threads);
      const Eigen::ThreadPoolDevice device(&pool, threads);
      EXPECT_TRUE(test::identical(outputs<TypeParam>(s, diffattn::eigen_executor(device)), serial))
          << threads << " Eigen threads";
#if defined(_OPENMP)
      EXPECT_TRUE(test::identical(outputs<TypeParam>(s, diffattn::openmp_executor(threads)), serial))
          << threads << " OpenMP threads";
#endif
    }
  }
}

TYPED_TEST(Executors, AllGiveTheSameWhenDecoding) {
  constexpr schedule_choice stream = schedule_choice::stream;
  for (const spec& s : decode_specs()) {
    SCOPED_TRACE(s.text());
    const std::vector<TypeParam> serial = outputs<TypeParam>(s, diffattn::serial_executor(), stream);
    EXPECT_TRUE(test::identical(outputs<TypeParam>(s, reversed_executor(), stream), serial)) << "reversed";
    for (const index_t workers : {1, 2, 3, 8, 64})
      EXPECT_TRUE(test::identical(outputs<TypeParam>(s, shuffled_executor(workers, 7), stream), serial))
          << workers << " shuffled";
    for (const int threads : {2, 3}) {
      Eigen::ThreadPool pool(threads);
      const Eigen::ThreadPoolDevice device(&pool, threads);
      EXPECT_TRUE(test::identical(outputs<TypeParam>(s, diffattn::eigen_executor(device), stream), serial))
          << threads << " Eigen threads";
#if defined(_OPENMP)
      EXPECT_TRUE(test::identical(outputs<TypeParam>(s, diffattn::openmp_executor(threads), stream), serial))
          << threads << " OpenMP threads";
#endif
    }
  }
}

// From a cache of 16-bit pages, with several threads on one sequence.
TEST(Executor, SplitsASequenceOfACache) {
  spec s;
  s.q_len = 2, s.kv_len = 5000, s.d = 16, s.width = 32, s.heads = 2, s.kv = 1, s.causal = true;
  problem<float> p(s);
  diffattn::kv_cache_config config = p.cache_config({diffattn::kv_cache_kind::paged, 16});
  for (const diffattn::storage type : test::float_storages) {
    config.keys = config.values = type;
    test::owned_cache cache(config);
    cache.append(1, p.k.view(), p.v.view(), 0, 0, s.kv_len);
    const index_t sequence = 1;
    diffattn::forward_args<float> a = p.args();
    a.k = a.v = {}, a.cache = cache->view(), a.sequences = &sequence;
    const auto run = [&](auto&& executor) {
      std::vector<unsigned char> memory(diffattn::workspace_bytes(a, executor.workers()), 0xff);
      EXPECT_EQ(diffattn::forward(a, {memory.data(), memory.size()}, executor), status::ok);
      return p.outputs();
    };
    for (const schedule_choice schedule : test::both_schedules) {
      a.schedule = schedule;
      const auto serial = run(diffattn::serial_executor());
      SCOPED_TRACE(std::string(test::name(type)) + ", " + test::name(schedule));
      for (const int threads : {2, 3}) {
        Eigen::ThreadPool pool(threads);
        const Eigen::ThreadPoolDevice device(&pool, threads);
        p.expect_identical(run(diffattn::eigen_executor(device)), serial);
      }
      for (const index_t workers : {2, 64}) p.expect_identical(run(shuffled_executor(workers, 5)), serial);
    }
  }
}

TEST(Executor, EachTaskOnce) {
  expect_runs_each_task_once(diffattn::serial_executor());
  for (const int threads : {1, 2, 3}) {
    Eigen::ThreadPool pool(threads);
    const Eigen::ThreadPoolDevice device(&pool, threads);
    expect_runs_each_task_once(diffattn::eigen_executor(device));
    EXPECT_EQ(diffattn::eigen_executor(device).workers(), threads);
#if defined(_OPENMP)
    expect_runs_each_task_once(diffattn::openmp_executor(threads));
    EXPECT_EQ(diffattn::openmp_executor(threads).workers(), threads);
#endif
  }
}

// One device, many calls at once from threads of their own.
TEST(Executor, EigenDeviceServesSeveralCallers) {
  Eigen::ThreadPool pool(2);
  const Eigen::ThreadPoolDevice device(&pool, 2);
  for (const schedule_choice schedule : test::both_schedules) {
    const spec s = schedule == schedule_choice::panels ? specs()[0] : decode_specs()[1];
    const std::vector<float> serial = outputs<float>(s, diffattn::serial_executor(), schedule);
    std::vector<float> results[3];
    std::vector<std::thread> callers;
    for (std::vector<float>& r : results)
      callers.emplace_back([&] { r = outputs<float>(s, diffattn::eigen_executor(device), schedule); });
    for (std::thread& t : callers) t.join();
    for (const std::vector<float>& r : results) EXPECT_TRUE(test::identical(r, serial));
  }
}

}  // namespace
