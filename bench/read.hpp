// SPDX-License-Identifier: MIT
#pragma once

// How fast memory can be read, which bounds every decode step. One stream does not reach it: the prefetchers of a core keep
// more reads in flight for several streams, and how many are best depends on the machine and on where the bytes are. So a
// reading of the same bytes by the same threads is tried in many patterns, and the fastest one is the measure.

#include <array>
#include <diffattn/simd/batch.hpp>

#include "check.hpp"
#include "harness.hpp"
#include "peak.hpp"

namespace bench {

/// `visit` bytes of each of `streams` streams in turn.
struct read_pattern {
  index_t streams = 1, visit = 512;
  std::vector<double> seconds;

  /// From one stream to the next. 17 lines beyond a page: streams a power of two apart would compete for few sets of the
  /// caches.
  index_t distance(index_t bytes) const { return bytes / streams / 4096 * 4096 - 4096 + 17 * 64; }
  index_t length(index_t bytes) const { return distance(bytes) / visit * visit; }
};

/// Combines streams of these bytes in registers: loads, and an xor each.
DIFFATTN_NOINLINE inline void read(const unsigned char* data, index_t bytes, const read_pattern& p) {
  namespace simd = diffattn::simd;
  constexpr int width = simd::lanes<float>, unroll = 8;
  static_assert(512 % (unroll * width * sizeof(float)) == 0, "a visit is a number of steps");
  const index_t distance = p.distance(bytes), length = p.length(bytes);
  simd::vec<float> sum[unroll];
  for (auto& s : sum) s = simd::broadcast(0.0f);
  for (index_t at = 0; at < length; at += p.visit)
    for (index_t stream = 0; stream < p.streams; ++stream) {
      const float* from = reinterpret_cast<const float*>(data + stream * distance + at);
      const float* const end = from + p.visit / static_cast<index_t>(sizeof(float));
      for (; from != end; from += unroll * width) {
        DIFFATTN_UNROLL
        for (int u = 0; u < unroll; ++u) sum[u] = sum[u] ^ simd::load(from + u * width);
      }
    }
  for (int u = 1; u < unroll; ++u) sum[0] = sum[0] ^ sum[u];
  float result[width];
  simd::store(result, sum[0]);
  volatile float sink = result[0];
  static_cast<void>(sink);
}

/// Readings of the same bytes of memory, between the steps that are measured.
class reader {
 public:
  /// Tries all patterns and keeps the four best.
  reader(const unsigned char* data, index_t bytes, team* threads, int workers)
      : bytes_(bytes / (workers > 1 ? tasks * workers : 1)), tasks_(workers > 1 ? tasks * workers : 1), team_(threads) {
    for (const index_t streams : {1, 2, 4, 8, 16})
      for (const index_t visit : {512, 1024, 2048, 4096}) {
        const read_pattern p{streams, visit, {}};
        if (p.length(bytes_) > 0) patterns_.push_back(p);
      }
    if (patterns_.empty()) throw std::runtime_error("too few bytes to measure the rate of reading");
    for (int round = 0; round < 3; ++round) sample(data);
    std::sort(patterns_.begin(), patterns_.end(), [this](const auto& a, const auto& b) { return rate(a) > rate(b); });
    if (patterns_.size() > 4) patterns_.resize(4);
    clear();
  }

  /// Every pattern once.
  void sample(const unsigned char* data) {
    for (read_pattern& p : patterns_) {
      const double start = seconds();
      if (team_)
        team_->executor().run(tasks_, [&](index_t task, index_t) { read(data + task * bytes_, bytes_, p); });
      else
        read(data, bytes_, p);
      p.seconds.push_back(seconds() - start);
    }
  }

  /// Bytes per second by the median of the best pattern since the last `clear`.
  double rate() const {
    double best = 0;
    for (const read_pattern& p : patterns_) best = std::max(best, rate(p));
    return best;
  }
  void clear() {
    for (read_pattern& p : patterns_) p.seconds.clear();
  }

 private:
  static constexpr index_t tasks = 8;  // of a thread: the other one may come late

  double rate(const read_pattern& p) const {
    return static_cast<double>(tasks_ * p.streams * p.length(bytes_)) / median(p.seconds);
  }

  index_t bytes_, tasks_;  // bytes of a task
  team* team_;
  std::vector<read_pattern> patterns_;
};

}  // namespace bench
