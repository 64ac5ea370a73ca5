// SPDX-License-Identifier: MIT
#pragma once

// The multiply-add rate of one core, which bounds every kernel here.

#include <algorithm>
#include <chrono>
#include <diffattn/simd/batch.hpp>

namespace bench {

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// FLOP/s of 12 independent chains of multiply-adds on registers: 4 cycles of latency at 2 a cycle need 8, and 12 leave slack
/// for uneven issue. About 0.3 ms; the fastest of many calls is the peak. The empty asm keeps the compiler from merging chains.
template <class T>
__attribute__((noinline)) double fma_rate() {
  namespace simd = diffattn::simd;
  using vec = simd::vec<T>;
  const vec x = simd::broadcast(T(0.999)), y = simd::broadcast(T(1e-3));
  auto a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x, a6 = x, a7 = x, a8 = x, a9 = x, a10 = x, a11 = x;
  const int rounds = 100000 / simd::lanes<T>;
  const double start = seconds();
  for (int i = 0; i < rounds; ++i) {
    const auto step = [&x, &y ](vec & a) __attribute__((always_inline)) {
      auto bits = simd::fma<T>(a, x, y).data;
#if defined(__x86_64__)
      asm volatile("" : "+v"(bits));
#endif
      a = vec(bits);
    };
    step(a0), step(a1), step(a2), step(a3), step(a4), step(a5), step(a6), step(a7), step(a8), step(a9), step(a10), step(a11);
  }
  const double time = seconds() - start;
  const vec sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11;
  T result[simd::lanes<T>];
  simd::store(result, sum);
  volatile T sink = result[0];
  (void)sink;
  return 2.0 * 12 * simd::lanes<T> * rounds / time;
}

/// The best rate seen so far, after one more look.
template <class T>
double peak_flop_rate() {
  static double best = 0;
  for (int i = 0; i < 3; ++i) best = std::max(best, fma_rate<T>());
  return best;
}

}  // namespace bench
