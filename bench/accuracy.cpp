// SPDX-License-Identifier: MIT

// What float rounding costs: the error of both schedules, and of the unfused composition in float, against the latter in
// double.
//
//   accuracy
//
// Errors are relative to the root mean square of the output (over all rows). One head of 2 x 64 channels.

#include <cstdio>
#include <diffattn/forward.hpp>
#include <random>
#include <vector>

#include "unfused.hpp"

namespace {

using diffattn::index_t;
constexpr index_t d = 64, dv = 2 * d;

struct numbers {
  std::vector<float> q, k, v;  // [tokens][2][d], [tokens][dv]
};

struct test_case {
  const char* name;
  index_t queries, keys;
  float lambda;
  double largest_logit;  // 0: whatever comes
  double distance;       // of the second map's queries and keys from the first map's, relative; 0: independent
};

numbers make(const test_case& c) {
  std::mt19937_64 engine(7);
  std::normal_distribution<double> normal;
  const auto fill = [&](std::vector<float>& x, index_t tokens, bool maps) {
    x.resize(static_cast<std::size_t>(tokens * dv));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double r = normal(engine);
      const bool second = maps && i / static_cast<std::size_t>(d) % 2 == 1 && c.distance > 0;
      x[i] = static_cast<float>(second ? double(x[i - static_cast<std::size_t>(d)]) * (1 + c.distance * r) : r);
    }
  };
  numbers n;
  fill(n.q, c.queries, true), fill(n.k, c.keys, true), fill(n.v, c.keys, false);
  if (c.largest_logit > 0) {
    double largest = 0;
    using rows = Eigen::Map<const Eigen::Matrix<float, -1, -1, Eigen::RowMajor>, 0, Eigen::OuterStride<>>;
    for (const index_t map : {index_t{0}, d}) {
      const rows q(n.q.data() + map, c.queries, d, Eigen::OuterStride<>(dv)),
          k(n.k.data() + map, c.keys, d, Eigen::OuterStride<>(dv));
      largest = std::max(largest, double((q * k.transpose()).cwiseAbs().maxCoeff()) / std::sqrt(double(d)));
    }
    for (float& x : n.q) x *= static_cast<float>(c.largest_logit / largest);
  }
  return n;
}

template <class T>
diffattn::forward_args<T> arguments(const test_case& c, const std::vector<T>& q, const std::vector<T>& k,
                                    const std::vector<T>& v, std::vector<T>& out, bool norm) {
  out.assign(static_cast<std::size_t>(c.queries * dv), T(0));
  diffattn::forward_args<T> a;
  a.q = diffattn::view(q.data(), 1, c.queries, 2, d), a.k = diffattn::view(k.data(), 1, c.keys, 2, d);
  a.v = diffattn::view(v.data(), 1, c.keys, 1, dv), a.out = diffattn::view(out.data(), 1, c.queries, 1, dv);
  a.heads = diffattn::head_map::interleaved(1, 1), a.lambda = static_cast<T>(c.lambda);
  if (!norm) a.norm = diffattn::head_norm<T>::none();
  return a;
}

/// The unfused composition always takes the RMS norm. With an eps that drowns the squares it is a product with exactly 1.
template <class T>
void run_unfused(diffattn::forward_args<T> a) {
  if (a.norm.kind == diffattn::norm_kind::none) a.norm.eps = T(0x1p100), a.norm.gain = T(0x1p50);
  bench::unfused<T>().head(a, 0, 0);
}

struct error {
  double largest, rms;
};
error error_of(const std::vector<float>& actual, const std::vector<double>& expected) {
  double largest = 0, squares = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double e = double(actual[i]) - expected[i];
    largest = std::max(largest, std::fabs(e)), squares += e * e, size += expected[i] * expected[i];
  }
  return {largest / std::sqrt(size / double(expected.size())), std::sqrt(squares / size)};
}

bool measure(const test_case& c) {
  const numbers n = make(c);
  const std::vector<double> q(n.q.begin(), n.q.end()), k(n.k.begin(), n.k.end()), v(n.v.begin(), n.v.end());
  bool best = true;
  for (const bool norm : {false, true}) {
    std::vector<double> expected;
    run_unfused(arguments(c, q, k, v, expected, norm));
    std::vector<float> out;
    diffattn::forward_args<float> a = arguments(c, n.q, n.k, n.v, out, norm);
    error e[3];
    run_unfused(a), e[2] = error_of(out, expected);
    a.schedule = diffattn::schedule_choice::panels, diffattn::forward(a), e[0] = error_of(out, expected);
    a.schedule = diffattn::schedule_choice::stream, diffattn::forward(a), e[1] = error_of(out, expected);
    std::printf("| %s | %s | %d |", c.name, norm ? "RMS" : "none", static_cast<int>(c.keys));
    for (const error& x : e) std::printf(" %.1e / %.1e |", x.largest, x.rms);
    std::printf("\n");
    best = best && std::max(e[0].rms, e[1].rms) <= e[2].rms && std::max(e[0].largest, e[1].largest) <= e[2].largest;
  }
  return best;
}

}  // namespace

int main() {
  std::printf(
      "| data | norm | keys | panels: max / rms | stream: max / rms | unfused float: max / rms |\n|---|---|---|---|---|---|\n");
  bool best = true;
  for (const test_case& c :
       {test_case{"unit normal", 1024, 1024, 0.36f, 0, 0}, test_case{"unit normal, few keys", 1024, 64, 0.36f, 0, 0},
        test_case{"largest logit 1e4", 8192, 1024, 0.36f, 1e4, 0},
        test_case{"nearly equal maps, λ = 1", 1024, 1024, 1.0f, 0, 1e-3}, test_case{"long", 64, 65536, 0.36f, 0, 0},
        test_case{"long, nearly equal maps, λ = 1", 64, 65536, 1.0f, 0, 1e-3}})
    best = measure(c) && best;
  std::printf("\n%s\n", best ? "Nowhere worse than unfused." : "Worse than unfused in some row.");
  return best ? 0 : 1;
}
