// SPDX-License-Identifier: MIT

// On the threads of an Eigen::ThreadPoolDevice. The library starts none of its own, and the result does not depend on them.

#define EIGEN_USE_THREADS
#include <chrono>
#include <cstdio>
#include <cstring>
#include <diffattn/diffattn.hpp>
#include <diffattn/executor/eigen_thread_pool.hpp>
#include <vector>

namespace {

using tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;

template <class Executor>
bool run(const char* name, const diffattn::forward_args<float>& args, Executor&& executor) {
  // Each worker has its own part of the workspace, so its size depends on their number.
  std::vector<unsigned char> scratch(diffattn::workspace_bytes(args, executor.workers()));
  const auto start = std::chrono::steady_clock::now();
  const diffattn::status s = diffattn::forward(args, {scratch.data(), scratch.size()}, executor);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  std::printf("%-20s %d worker(s): %s, %.2f ms\n", name, static_cast<int>(executor.workers()), diffattn::message(s),
              time.count());
  return s == diffattn::status::ok;
}

}  // namespace

int main() {
  const int n = 1024, heads = 4, width = 64;
  tensor q(1, n, 2 * heads, width), k(1, n, 2 * heads, width), v(1, n, heads, 2 * width);
  tensor serial(1, n, heads, 2 * width), threaded(1, n, heads, 2 * width);
  q.setRandom(), k.setRandom(), v.setRandom();

  diffattn::forward_args<float> args;
  args.q = diffattn::view(q), args.k = diffattn::view(k), args.v = diffattn::view(v);
  args.heads = diffattn::head_map::interleaved(heads, heads);
  args.lambda = 0.2f;
  args.mask.causal = true;

  Eigen::ThreadPool pool(2);
  Eigen::ThreadPoolDevice device(&pool, 2);

  args.out = diffattn::view(serial);
  if (!run("serial_executor", args, diffattn::serial_executor{})) return 1;
  args.out = diffattn::view(threaded);
  if (!run("eigen_executor", args, diffattn::eigen_executor(device))) return 1;

  const bool same = std::memcmp(serial.data(), threaded.data(), static_cast<std::size_t>(serial.size()) * sizeof(float)) == 0;
  std::printf("bit-identical: %s\n", same ? "yes" : "no");
  return same ? 0 : 1;
}
