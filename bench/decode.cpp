// SPDX-License-Identifier: MIT

// How fast one token is decoded from a cache, beside reading the same bytes, and beside standard attention.
//
//   decode [--smoke] [--table_out=FILE] [--benchmark_...]
//
// Every step is checked against double arithmetic before it is timed; readings alternate with steps. The tables give medians.

#include <cstring>
#include <functional>
#include <set>

#include "harness.hpp"
#include "read.hpp"
#include "step.hpp"

namespace {

using bench::index_t;
using bench::samples;
using bench::step_shape;
using bench::storage;
using bench::text;

bool failed = false;
std::map<std::string, samples> measured;

bench::team& two_threads() {
  static bench::team two(2);
  return two;
}

/// Steps that read as many bytes share their readings' patterns.
bench::reader& reader_of(const step_shape& s, const unsigned char* data) {
  static std::map<std::pair<index_t, int>, bench::reader> readers;
  const std::pair<index_t, int> key{s.bytes(), s.threads};
  const auto found = readers.find(key);
  if (found != readers.end()) return found->second;
  bench::team* const threads = s.threads > 1 ? &two_threads() : nullptr;
  return readers.emplace(key, bench::reader(data, s.bytes(), threads, s.threads)).first->second;
}

void time_step(benchmark::State& state, const step_shape& s, bool with_error) {
  static std::set<std::string> checked;
  static std::map<std::string, bench::storage_error> errors;
  try {
    bench::step step(s, s.threads > 1 ? &two_threads() : nullptr);
    if (checked.count(s.name()) == 0) {
      step.check();
      if (with_error) errors[s.name()] = step.error();
      checked.insert(s.name());
    }
    bench::reader& reader = reader_of(s, step.stored());
    reader.clear();
    step.run();
    std::vector<double> seconds;
    for (auto _ : state) {
      const double start = bench::seconds();
      step.run();
      seconds.push_back(bench::seconds() - start);
      state.PauseTiming();
      reader.sample(step.stored());
      state.ResumeTiming();
    }
    const double time = bench::median(seconds), rate = static_cast<double>(s.bytes()) / time;
    state.counters["kv_bytes_per_second"] = rate;
    state.counters["bandwidth_fraction"] = rate / reader.rate();
    state.counters["tokens_per_second"] = static_cast<double>(s.batch) / time;
    if (!with_error) return;
    state.counters["max_error"] = errors[s.name()].max;
    state.counters["rms_error"] = errors[s.name()].rms;
  } catch (const std::exception& e) {
    failed = true;
    state.SkipWithError(e.what());
  }
}

/// Differential steps; each has a standard one.
std::vector<step_shape> shapes(bool smoke) {
  constexpr storage types[] = {storage::f32, storage::f16, storage::bf16, storage::int8, storage::q6};
  std::vector<step_shape> all;
  if (smoke) {
    for (const storage type : types) all.push_back({type, 4, 4, 64, 512});
    all.push_back({storage::f32, 8, 2, 128, 1025, 2});
    all.push_back({storage::int8, 4, 4, 80, 2500, 1, 2});
    return all;
  }
  for (const storage type : types) {
    for (const index_t d : {64, 128})
      for (const index_t kv : {1024, 4096, 16384}) all.push_back({type, 8, 8, d, kv});
    all.push_back({type, 8, 8, 64, 4096, 8});
    if (type == storage::f16) continue;
    for (const int threads : {1, 2}) all.push_back({type, 8, 8, 64, 65536, 1, threads});
    if (type != storage::q6) all.push_back({type, 32, 8, 64, 16384});
    if (type == storage::f32) all.push_back({type, 32, 8, 64, 65536});
  }
  return all;
}

double time(const step_shape& s) {
  const auto found = measured.find(s.name());
  return found == measured.end() ? std::nan("") : found->second.time();
}
double counter(const step_shape& s, const char* name) {
  const auto found = measured.find(s.name());
  return found == measured.end() ? std::nan("") : found->second.middle(name);
}

double over_standard(step_shape s) {
  const double ours = time(s);
  s.differential = false;
  return ours / time(s);
}
/// Tokens per second, f32 = 1.
double over_f32(step_shape s) {
  const double ours = time(s);
  s.type = storage::f32;
  return time(s) / ours;
}
/// Time with several query heads to a key head, one = 1.
double over_one_query(step_shape s) {
  const double ours = time(s);
  if (s.heads == s.kv_heads) return std::nan("");
  s.heads = s.kv_heads;
  return ours / time(s);
}
double bytes_over_f32(step_shape s) {
  const double ours = static_cast<double>(s.bytes());
  s.type = storage::f32;
  return ours / static_cast<double>(s.bytes());
}

void print_rows(std::FILE* to, const std::vector<step_shape>& all) {
  std::fprintf(to, "\n%-4s %5s %4s %4s %6s %2s %2s | %12s %12s | %7s %7s %7s | %7s %7s %7s | %9s | %8s %8s\n", "", "heads",
               "kv", "d", "tokens", "b", "t", "differential", "standard", "GB/s", "read", "% read", "x f32", "d/s", "4 q / 1",
               "tokens/s", "max err", "rms err");
  for (const step_shape& s : all) {
    if (time(s) != time(s)) continue;
    step_shape standard = s;
    standard.differential = false;
    const double rate = counter(s, "kv_bytes_per_second"), fraction = counter(s, "bandwidth_fraction");
    std::fprintf(to, "%-4s %5d %4d %4d %6d %2d %2d | %9.3f ms %12s | %7.1f %7.1f %7.1f | %7s %7s %7s | %9.0f | %8s %8s\n",
                 bench::name(s.type), static_cast<int>(s.heads), static_cast<int>(s.kv_heads), static_cast<int>(s.d),
                 static_cast<int>(s.kv), static_cast<int>(s.batch), s.threads, time(s) * 1e3,
                 text("%9.3f ms", time(standard) * 1e3).c_str(), rate / 1e9, rate / fraction / 1e9, fraction * 100,
                 text("%.2f", over_f32(s)).c_str(), text("%.3f", over_standard(s)).c_str(),
                 text("%.2f", over_one_query(s)).c_str(), counter(s, "tokens_per_second"),
                 text("%.1e", counter(s, "max_error")).c_str(), text("%.1e", counter(s, "rms_error")).c_str());
  }
}

/// A target and the row that is furthest from it.
void print_figures(std::FILE* to, const std::vector<step_shape>& all) {
  // Twice the last cache: much of a smaller one stays in it from step to step.
  index_t last_cache = 0;
  for (const auto& cache : benchmark::CPUInfo::Get().caches) last_cache = std::max<index_t>(last_cache, cache.size);
  using figure = std::function<double(const step_shape&)>;
  const auto only = [](const auto& condition, const figure& f) -> figure {
    return [=](const step_shape& s) { return condition(s) ? f(s) : std::nan(""); };
  };
  const auto one = [](const step_shape& s) { return s.threads == 1 && s.batch == 1 && s.heads == s.kv_heads; };
  const auto read = [&](storage a, storage b) {
    return only([=](const step_shape& s) { return one(s) && (s.type == a || s.type == b) && s.bytes() >= 2 * last_cache; },
                [](const step_shape& s) { return 100 * counter(s, "bandwidth_fraction"); });
  };
  const auto speed = [&](storage type) {
    return only([=](const step_shape& s) { return one(s) && s.type == type && s.kv == 16384; }, over_f32);
  };
  const auto of_type = [&](storage type, const figure& f) {
    return only([=](const step_shape& s) { return one(s) && s.type == type && s.d == 64; }, f);
  };
  const figure error = [](const step_shape& s) { return counter(s, "max_error"); };
  const struct {
    const char* what;
    bool at_least;
    double target;
    figure of;
  } figures[] = {
      {"% of reading, beyond cache, f32", true, 92, read(storage::f32, storage::f32)},
      {"% of reading, beyond cache, bf16, f16", true, 88, read(storage::bf16, storage::f16)},
      {"% of reading, beyond cache, int8", true, 75, read(storage::int8, storage::int8)},
      {"differential / standard", false, 1.05, over_standard},
      {"speed over f32, 16384, bf16", true, 1.9, speed(storage::bf16)},
      {"speed over f32, 16384, int8", true, 3.3, speed(storage::int8)},
      {"speed over f32, 16384, q6", true, 3.5, speed(storage::q6)},
      {"4 query heads / 1, f32, from 16384", false, 1.3,
       only([](const step_shape& s) { return s.type == storage::f32 && s.kv >= 16384; }, over_one_query)},
      {"bytes / f32, bf16", false, 0.5, of_type(storage::bf16, bytes_over_f32)},
      {"bytes / f32, int8", false, 0.27, of_type(storage::int8, bytes_over_f32)},
      {"bytes / f32, q6", false, 0.21, of_type(storage::q6, bytes_over_f32)},
      {"max error, bf16", false, 4e-3, of_type(storage::bf16, error)},
      {"max error, int8", false, 8e-3, of_type(storage::int8, error)},
      {"max error, q6", false, 3e-2, of_type(storage::q6, error)},
      {"% of reading, two threads", true, 90,
       only([](const step_shape& s) { return s.threads == 2; },
            [](const step_shape& s) { return 100 * counter(s, "bandwidth_fraction"); })},
  };
  std::fprintf(to, "\n%-38s %8s %8s\n", "figure", "target", "worst");
  for (const auto& f : figures) {
    const step_shape* at = nullptr;
    for (const step_shape& s : all) {
      const double x = f.of(s);
      if (time(s) == time(s) && x == x && (!at || (f.at_least ? x < f.of(*at) : x > f.of(*at)))) at = &s;
    }
    if (!at) continue;
    const double worst = f.of(*at);
    const bool met = f.at_least ? worst >= f.target : worst <= f.target;
    std::fprintf(to, "%-38s %s %5.3g %8.3g  %-6s  %s\n", f.what, f.at_least ? ">=" : "<=", f.target, worst,
                 met ? "met" : "missed", at->name().c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  bench::command_line flags;
  if (!flags.parse(argc, argv, 7, "0.1")) return 1;
  const std::vector<step_shape> all = shapes(flags.smoke);
  for (step_shape s : all)
    for (const bool differential : {true, false}) {
      s.differential = differential;
      bench::shared_cache::get().reserve(s);
      const bool with_error = differential && s.batch == 1 && s.threads == 1 && s.d == 64 && s.kv == (flags.smoke ? 512 : 4096);
      benchmark::RegisterBenchmark(s.name().c_str(), time_step, s, with_error)->Unit(benchmark::kMillisecond);
    }
  measured = flags.run();
  const auto print = [&](std::FILE* to) {
    print_rows(to, all);
    if (!flags.smoke) print_figures(to, all);
  };
  if (!measured.empty()) print(flags.table_stream());
  if (!flags.table_file.empty()) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(flags.table_file.c_str(), "w"), std::fclose);
    if (file) print(file.get());
  }
  benchmark::Shutdown();
  return failed ? 1 : 0;
}
