// SPDX-License-Identifier: MIT

// What differential attention costs beside standard attention, and beside the same written with Eigen alone.
//
//   compare [--smoke] [--table_out=FILE] [--benchmark_...]
//
// Every shape is checked against double arithmetic before it is timed. The table gives medians.

#include <exception>
#include <fstream>

#include "harness.hpp"
#include "peak.hpp"
#include "problem.hpp"

namespace {

using bench::contender;
using bench::index_t;
using bench::samples;
using bench::shape;
using bench::text;

std::map<std::string, std::unique_ptr<bench::problem<float>>> problems;
bool failed = false;

bench::problem<float>& problem_of(const shape& s) {
  auto& p = problems[s.suffix("float")];
  if (!p) p = std::make_unique<bench::problem<float>>(s);
  return *p;
}

void time_forward(benchmark::State& state, contender who, const shape& s) {
  try {
    bench::problem<float>& p = problem_of(s);
    const double peak = bench::peak_flop_rate<float>() * s.threads;
    const double start = bench::seconds();
    for (auto _ : state) p.run(who);
    const double rate = s.flop() * static_cast<double>(state.iterations()) / (bench::seconds() - start);
    state.counters["flop_rate"] = rate;
    state.counters["peak_fraction"] = rate / peak;
  } catch (const std::exception& e) {
    failed = true;
    state.SkipWithError(e.what());
  }
}

void add(const shape& s) {
  for (const contender who : {contender::differential, contender::standard, contender::unfused}) {
    if (who == contender::unfused && (!s.has_unfused() || (s.d == 128 && s.n >= 16384))) continue;
    auto* b = benchmark::RegisterBenchmark((std::string("forward/") + bench::name(who) + "/" + s.suffix("float")).c_str(),
                                           time_forward, who, s);
    b->Unit(benchmark::kMillisecond);
    if (s.n >= 16384 && s.window == 0) b->Repetitions(3);  // seconds each
  }
}

/// Heads of a model this wide up to 1024 tokens, one head beyond, for the sake of the time.
constexpr index_t model_width = 1024;

std::vector<shape> shapes(bool smoke) {
  std::vector<shape> all;
  const auto both_masks = [&all](shape s) {
    for (const bool causal : {false, true}) {
      s.causal = causal;
      all.push_back(s);
    }
  };
  if (smoke) {
    both_masks({false, 64, 128, 2});
    both_masks({false, 80, 197, 2});
    both_masks({false, 64, 256, 2, 2});
    all.push_back({true, 64, 300, 1, 1, false, 50});
    all.push_back({true, 16, 512, 4, 1, true});
    return all;
  }
  for (const index_t d : {64, 128}) {
    for (const index_t n : {128, 512, 1024}) both_masks({false, d, n, model_width / d / 2});
    both_masks({false, d, 4096, 1});
    both_masks({false, d, 16384, 1});
    all.push_back({true, d, 16384, 1, 1, false, 512});
  }
  for (const index_t n : {197, 1000}) both_masks({false, 64, n, 8});
  both_masks({false, 64, 4095, 1});
  for (const index_t d : {80, 96}) both_masks({false, d, 1024, model_width / d / 2});
  both_masks({false, 64, 1024, 8, 2});
  both_masks({false, 64, 4096, 1, 2});
  for (const index_t n : {512, 1024, 4096}) all.push_back({true, 16, n, 4, 1, true});
  return all;
}

class table {
 public:
  table(const std::vector<shape>& all, const std::map<std::string, samples>& measured) : all_(all), measured_(measured) {}

  const samples* find(contender who, const shape& s) const {
    const auto it = measured_.find(std::string("forward/") + bench::name(who) + "/" + s.suffix("float"));
    return it == measured_.end() ? nullptr : &it->second;
  }
  double time(contender who, const shape& s) const {
    const samples* found = find(who, s);
    return found ? found->time() : std::nan("");
  }

  /// Medians in ms; peak fraction of the best repetition; the largest error of sampled rows against double, ours and unfused.
  void print(std::FILE* to) const {
    std::fprintf(to, "\n%-6s %4s %6s %2s | %12s %12s %12s | %8s %8s | %6s | %9s %9s\n", "mask", "d", "n", "t", "differential",
                 "standard", "unfused", "diff/std", "unf/diff", "% peak", "max error", "unfused");
    for (const shape& s : all_) {
      if (!find(contender::differential, s)) continue;
      const double ours = time(contender::differential, s), standard = time(contender::standard, s);
      const double unfused = time(contender::unfused, s);
      const auto& p = *problems.at(s.suffix("float"));
      std::fprintf(to, "%-6s %4d %6d %2d | %9.3f ms %9.3f ms %12s | %8s %8s | %5.1f%% | %9.1e %9s%s\n", s.mask(),
                   static_cast<int>(s.d), static_cast<int>(s.n), s.threads, ours * 1e3, standard * 1e3,
                   text("%9.3f ms", unfused * 1e3).c_str(), text("%.3f", ours / standard).c_str(),
                   text("%.2f", unfused / ours).c_str(), find(contender::differential, s)->best("peak_fraction") * 100,
                   p.error(), s.has_unfused() ? text("%.1e", p.unfused_error()).c_str() : "-", s.real ? "  real q, k, v" : "");
    }
  }

  /// What the rows say beside each other: masks, threads, ragged shapes, memory.
  void print_derived(std::FILE* to) const {
    std::fprintf(to, "\ncausal / full:           ");
    for (const shape& s : all_) {
      shape full = s;
      full.causal = false;
      if (s.causal && !s.real && s.threads == 1 && s.window == 0)
        ratio(to, s, time(contender::differential, s) / time(contender::differential, full));
    }
    std::fprintf(to, "\ntime per useful FLOP, window of 512 / all of 512 keys, of 1024: ");
    for (const shape& s : all_)
      for (const index_t n : {512, 1024}) {
        const shape full{false, s.d, n, model_width / s.d / 2};
        if (s.window == 512)
          ratio(to, s, time(contender::differential, s) / s.flop() / (time(contender::differential, full) / full.flop()));
      }
    std::fprintf(to, "\none thread / two:        ");
    for (const shape& s : all_) {
      shape one = s;
      one.threads = 1;
      if (s.threads == 2) ratio(to, s, time(contender::differential, one) / time(contender::differential, s));
    }
    std::fprintf(to, "\ntime per useful FLOP, ragged / round: ");
    for (const shape& s : all_) {
      shape round = s;
      round.d = s.d < 96 ? 64 : s.d == 96 ? 128 : s.d;
      round.n = s.n == 197 ? 128 : s.n == 1000 ? 1024 : s.n == 4095 ? 4096 : s.n;
      if (s.real || s.threads > 1 || s.window > 0 || (round.d == s.d && round.n == s.n)) continue;
      for (const shape& other : all_)
        if (other.suffix("") == round.suffix("")) round.heads = other.heads;
      ratio(to, s, time(contender::differential, s) / s.flop() / (time(contender::differential, round) / round.flop()));
    }
    std::fprintf(to, "\n");
    print_memory(to);
  }

  void write(const std::string& path) const {
    std::ofstream to(path);
    to << "mask\td\tn\tthreads\treal\tdifferential_ms\tstandard_ms\tunfused_ms\tdifferential_peak\tstandard_peak\tunfused_"
          "peak\terror\tunfused_error\n";
    for (const shape& s : all_) {
      if (!find(contender::differential, s)) continue;
      to << s.mask() << '\t' << s.d << '\t' << s.n << '\t' << s.threads << '\t' << s.real;
      for (const contender c : {contender::differential, contender::standard, contender::unfused})
        to << '\t' << time(c, s) * 1e3;
      for (const contender c : {contender::differential, contender::standard, contender::unfused})
        to << '\t' << (find(c, s) ? find(c, s)->best("peak_fraction") * 100 : std::nan(""));
      const auto& p = *problems.at(s.suffix("float"));
      to << '\t' << p.error() << '\t' << p.unfused_error() << '\n';
    }
  }

 private:
  static void ratio(std::FILE* to, const shape& s, double r) {
    if (r == r) std::fprintf(to, " %s d=%d n=%d %.3f;", s.mask(), static_cast<int>(s.d), static_cast<int>(s.n), r);
  }

  /// Bytes of tensors and workspace of both kinds of attention at n = 65536; nothing is run.
  static void print_memory(std::FILE* to) {
    constexpr index_t n = 65536, heads = 8, d = 64;
    constexpr std::size_t elements = static_cast<std::size_t>(n * 2 * heads * d);
    const std::unique_ptr<float[]> memory(new float[4 * elements]);  // never touched
    float* const p = memory.get();
    diffattn::forward_args<float> a;
    a.q = diffattn::view<const float>(p, 1, n, 2 * heads, d);
    a.k = diffattn::view<const float>(p + elements, 1, n, 2 * heads, d);
    a.v = diffattn::view<const float>(p + 2 * elements, 1, n, heads, 2 * d);
    a.out = diffattn::view(p + 3 * elements, 1, n, heads, 2 * d);
    a.heads = diffattn::head_map::interleaved(heads, heads);
    a.lambda = 0.5f;
    diffattn::attention_args<float> s;
    s.q = a.q, s.k = a.k;
    s.v = diffattn::view<const float>(p + 2 * elements, 1, n, 2 * heads, d);
    s.out = diffattn::view(p + 3 * elements, 1, n, 2 * heads, d);
    const double tensors = 16.0 * static_cast<double>(elements);
    const double ours = static_cast<double>(diffattn::workspace_bytes(a)),
                 theirs = static_cast<double>(diffattn::workspace_bytes(s));
    std::fprintf(to,
                 "memory at n = 65536, 8 heads of 2 x 64: tensors %.0f MB, workspace %.1f MB (standard %.1f MB), ratio %.3f\n",
                 tensors / 1e6, ours / 1e6, theirs / 1e6, (tensors + ours) / (tensors + theirs));
  }

  const std::vector<shape>& all_;
  const std::map<std::string, samples>& measured_;
};

}  // namespace

int main(int argc, char** argv) {
  bench::command_line flags;
  if (!flags.parse(argc, argv, 11, "0.02")) return 1;
  Eigen::setNbThreads(1);
  const std::vector<shape> all = shapes(flags.smoke);
  for (const shape& s : all) add(s);
  const std::map<std::string, samples> measured = flags.run();
  const table rows(all, measured);
  if (!measured.empty()) {
    rows.print(flags.table_stream());
    rows.print_derived(flags.table_stream());
    if (!flags.table_file.empty()) rows.write(flags.table_file);
  }
  benchmark::Shutdown();
  return failed ? 1 : 0;
}
