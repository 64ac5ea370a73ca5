// SPDX-License-Identifier: MIT
#pragma once

// What the programs here share: their flags, medians instead of single repetitions, and threads.

#define EIGEN_USE_THREADS
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <diffattn/executor/eigen_thread_pool.hpp>
#include <map>
#include <memory>
#include <string>
#include <unsupported/Eigen/CXX11/Tensor>
#include <utility>
#include <vector>

namespace bench {

inline double median(std::vector<double> x) {
  if (x.empty()) return std::nan("");
  std::sort(x.begin(), x.end());
  const std::size_t middle = x.size() / 2;
  return x.size() % 2 ? x[middle] : (x[middle - 1] + x[middle]) / 2;
}

/// A number that was measured, or a dash.
inline std::string text(const char* format, double x) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, format, x);
  return x == x ? buffer : "-";
}

/// The measurements of one benchmark, by repetition.
struct samples {
  std::vector<double> seconds;
  std::map<std::string, std::vector<double>> counters;

  double time() const { return median(seconds); }
  /// NaN for a counter that this benchmark does not have.
  double middle(const std::string& counter) const { return has(counter) ? median(counters.at(counter)) : std::nan(""); }
  double best(const std::string& counter) const {
    return has(counter) ? *std::max_element(counters.at(counter).begin(), counters.at(counter).end()) : std::nan("");
  }

 private:
  bool has(const std::string& counter) const { return counters.count(counter) > 0; }
};

/// Passes medians on to the reporter that the flags ask for, keeps everything for the table.
class collector : public benchmark::BenchmarkReporter {
 public:
  explicit collector(benchmark::BenchmarkReporter* shown) : shown_(shown) {}

  bool ReportContext(const Context& context) override { return shown_->ReportContext(context); }
  void ReportRuns(const std::vector<Run>& runs) override {
    std::vector<Run> medians;
    for (const Run& run : runs) {
      if (run.run_type == Run::RT_Aggregate) {
        if (run.aggregate_name == "median") medians.push_back(run);
      } else if (run.iterations > 0) {
        samples& s = measured[run.run_name.function_name];
        s.seconds.push_back(run.real_accumulated_time / static_cast<double>(run.iterations));
        for (const auto& [name, value] : run.counters) s.counters[name].push_back(value);
        if (run.repetitions == 1) medians.push_back(run);
      } else {
        medians.push_back(run);  // an error
      }
    }
    if (!medians.empty()) shown_->ReportRuns(medians);
  }
  void Finalize() override { shown_->Finalize(); }

  std::map<std::string, samples> measured;

 private:
  benchmark::BenchmarkReporter* shown_;
};

/// The command line: Google Benchmark's flags and two of ours. Repetitions of all benchmarks are interleaved at random, so that
/// a busy moment of the machine falls on all alike.
class command_line {
 public:
  bool smoke = false;
  std::string table_file;

  /// False if there is a flag that nobody knows. The user's own flags win over both numbers.
  bool parse(int argc, char** argv, int repetitions, const char* min_time) {
    std::vector<std::string> given;
    for (int i = 1; i < argc; ++i) {
      const std::string arg = argv[i];
      if (arg == "--smoke")
        smoke = true;
      else if (arg.rfind("--table_out=", 0) == 0)
        table_file = arg.substr(12);
      else
        given.push_back(arg);
      if (arg.rfind("--benchmark_format=", 0) == 0 && arg != "--benchmark_format=console") to_console_ = false;
    }
    // Defaults first: a later flag of the user's wins.
    flags_ = {argv[0], "--benchmark_enable_random_interleaving=true",
              "--benchmark_repetitions=" + std::to_string(smoke ? 2 : repetitions),
              std::string("--benchmark_min_time=") + (smoke ? "0.002" : min_time)};
    flags_.insert(flags_.end(), given.begin(), given.end());
    std::vector<char*> pointers;
    for (std::string& f : flags_) pointers.push_back(f.data());
    int count = static_cast<int>(pointers.size());
    benchmark::Initialize(&count, pointers.data());
    return !benchmark::ReportUnrecognizedArguments(count, pointers.data());
  }

  /// Runs everything registered; the measurements by name.
  static std::map<std::string, samples> run() {
    const std::unique_ptr<benchmark::BenchmarkReporter> shown(benchmark::CreateDefaultDisplayReporter());
    collector results(shown.get());
    benchmark::RunSpecifiedBenchmarks(&results);
    return results.measured;
  }

  /// Where a table for people goes: not between the lines of another format.
  std::FILE* table_stream() const { return to_console_ ? stdout : stderr; }

 private:
  bool to_console_ = true;
  std::vector<std::string> flags_;  ///< Google Benchmark keeps pointers to them
};

/// The calling thread and threads - 1 others.
class team {
 public:
  explicit team(int threads) : pool_(threads - 1), device_(&pool_, threads) {}
  diffattn::eigen_executor executor() const { return diffattn::eigen_executor(device_); }

 private:
  Eigen::ThreadPool pool_;
  Eigen::ThreadPoolDevice device_;
};

}  // namespace bench
