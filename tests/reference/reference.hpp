// SPDX-License-Identifier: MIT
#pragma once

// Differential attention as the paper writes it (arXiv 2410.05258, equations 1 to 3), in double, one loop for each sum. It
// shares nothing with the library: masks are decided key by key, heads are plain numbers.
//
// Beside each result stands `error`, a bound for the same number computed in a type of unit roundoff u, in units of u.
// Roundings are taken as independent, so k of them add up to 4 √k u (Higham and Mary 2019; exceeded with probability 2
// exp(-8)):
//
//   logit_j          4 √(d+4) (Σ|q k| scale + max|logit| + 1): d products, two scalings of q, the shift by the maximum
//   weight_j / Σ     that of its logit, the weighted mean of all logits' (through the sum), 4 √n for the sum, 8 for exp and mixing
//   Σ weight_j v_j   Σ weight_j |v_j| times that, and 4 √n again for its own additions
//   norm             y = x / R: |x'/R' - x/R| <= (e + |x| E / R) / R', where E = rms(e) bounds R - R'; R' >= max(R - E, √eps)

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace reference {

template <class T>
struct tensor {
  const T* data;
  long batch, token, head;  // strides
  double operator()(long b, long t, long h, long c) const { return double(data[b * batch + t * token + h * head + c]); }
};

struct head {
  long q[2], k[2], v1, v2;  // v2 = -1: the value is one head as wide as the output
};

enum class norm { none, rms, group };

template <class T>
struct problem {
  long batch = 1, q_len = 0, kv_len = 0, d = 0, dv = 0;
  tensor<T> q{}, k{}, v{};
  std::vector<head> heads;
  std::vector<double> factor[2];  // α and λ, [batch][q_len][heads]
  double scale = 1;
  bool causal = false;
  long offset = 0, window = 0;           // 0: no window
  std::vector<long> first, last;         // keys first … last - 1 of each batch entry; empty: all
  std::vector<long> prefix;              // of each batch entry or packed sequence; empty: 0
  std::vector<long> q_starts, k_starts;  // packed sequences; empty: none
  double cap[2] = {0, 0};                // 0: none
  std::function<double(int m, long b, long h, long i, long j)> added;  // to a logit after the cap; -inf hides. Empty: 0
  std::function<bool(int m, long b, long h, long i, long j)> shown;    // empty: all
  std::vector<double> sink[2];                                         // [heads]; empty: none
  norm kind = norm::none;
  double eps = 0, gain = 1;
  std::vector<double> weight, bias;  // empty: 1 and 0

  bool allowed(long b, long row, long key) const {
    if (!first.empty() && (key < first[size_t(b)] || key >= last[size_t(b)])) return false;
    long own = row + offset, start = 0, entry = b;
    for (size_t s = 0; s + 1 < q_starts.size(); ++s) {
      if (row < q_starts[s] || row >= q_starts[s + 1]) continue;
      if (key < k_starts[s] || key >= k_starts[s + 1]) return false;
      entry = long(s), start = k_starts[s];
      own = k_starts[s + 1] - (q_starts[s + 1] - row);  // aligned to the end of the sequence
    }
    if (!causal) return true;
    const bool before = !prefix.empty() && key < start + prefix[size_t(entry)];
    return (key <= own || before) && (window == 0 || key + window > own);
  }
};

struct numbers {
  std::vector<double> value, error;
  void add(double v, double e) { value.push_back(v), error.push_back(e); }
};

struct result {
  numbers out, diff, av[2];  // [batch][q_len][heads][dv]
  numbers lse[2];            // [batch][q_len][heads]
};

template <class T>
result attention(const problem<T>& p) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto grown = [](long roundings) { return 4 * std::sqrt(double(roundings)); };
  result r;
  for (long b = 0; b < p.batch; ++b)
    for (long i = 0; i < p.q_len; ++i)
      for (size_t h = 0; h < p.heads.size(); ++h) {
        const head& at = p.heads[h];
        std::vector<long> keys;
        for (long j = 0; j < p.kv_len; ++j)
          if (p.allowed(b, i, j)) keys.push_back(j);
        const size_t n = keys.size();
        std::vector<double> weight[2], weight_error[2];
        std::vector<bool> hidden[2] = {std::vector<bool>(n), std::vector<bool>(n)};
        for (int m = 0; m < 2; ++m) {
          std::vector<double> logit(n), size(n);
          const long head_number = long(h);
          double top = -inf, largest = 0, sum = 0, mean_error = 0;
          for (size_t j = 0; j < n; ++j) {
            for (long c = 0; c < p.d; ++c) {
              const double product = p.q(b, i, at.q[m], c) * p.k(b, keys[j], at.k[m], c) * p.scale;
              logit[j] += product, size[j] += std::fabs(product);
            }
            if (p.cap[m] > 0) logit[j] = p.cap[m] * std::tanh(logit[j] / p.cap[m]), size[j] += std::fabs(logit[j]);
            if (p.added) {
              const double a = p.added(m, b, head_number, i, keys[j]);
              if (a == -inf)
                logit[j] = -inf, hidden[m][j] = true;
              else
                logit[j] += a, size[j] += std::fabs(a);
            }
            if (p.shown && !p.shown(m, b, head_number, i, keys[j])) logit[j] = -inf, hidden[m][j] = true;
            if (hidden[m][j]) size[j] = 0;
            if (logit[j] > top) top = logit[j];
            if (std::isfinite(logit[j])) largest = std::max(largest, std::fabs(logit[j]));
          }
          const double sink = p.sink[m].empty() ? -inf : p.sink[m][h];
          if (sink > top) top = sink;
          if (std::isfinite(sink)) largest = std::max(largest, std::fabs(sink));
          weight[m].resize(n), weight_error[m].resize(n);
          if (sink != -inf) sum = std::exp(sink - top);
          for (size_t j = 0; j < n; ++j) sum += weight[m][j] = std::exp(logit[j] - (top == -inf ? 0 : top));
          for (size_t j = 0; j < n; ++j) {
            if (sum != 0) weight[m][j] /= sum;
            if (weight[m][j] == 0) continue;
            weight_error[m][j] = grown(p.d + 4) * (size[j] + largest + 1);
            mean_error += weight[m][j] * weight_error[m][j];
          }
          for (double& e : weight_error[m]) e += mean_error + grown(long(n)) + 8;
          r.lse[m].add(sum == 0 ? -inf : top + std::log(sum), mean_error + grown(long(n)) + 8 * (largest + 1));
        }
        const size_t row = (size_t(b) * size_t(p.q_len) + size_t(i)) * p.heads.size() + h;
        const double factor[2] = {p.factor[0][row], p.factor[1][row]};
        std::vector<double> x(size_t(p.dv)), e(size_t(p.dv));
        for (long c = 0; c < p.dv; ++c) {
          const long width = at.v2 < 0 ? p.dv : p.dv / 2;
          double av[2] = {0, 0}, av_error[2] = {0, 0}, difference = 0, error = 0;
          for (size_t j = 0; j < n; ++j) {
            const double v = p.v(b, keys[j], c < width ? at.v1 : at.v2, c % width);
            for (int m = 0; m < 2; ++m) {
              const double bound = (weight_error[m][j] + grown(long(n))) * weight[m][j] * std::fabs(v);
              if (hidden[m][j]) continue;
              av[m] += weight[m][j] * v, av_error[m] += bound, error += std::fabs(factor[m]) * bound;
            }
            if (!hidden[0][j] || !hidden[1][j]) difference += (factor[0] * weight[0][j] - factor[1] * weight[1][j]) * v;
          }
          for (int m = 0; m < 2; ++m) r.av[m].add(av[m], av_error[m]);
          r.diff.add(difference, error);
          x[size_t(c)] = difference, e[size_t(c)] = error;
        }
        const double u = std::numeric_limits<T>::epsilon() / 2, dv = double(p.dv);
        double mean = 0, size = 0, mean_e = 0, square = 0, square_e = 0, root = 1, least = 1, root_e = 0;
        for (size_t c = 0; c < x.size(); ++c) mean += x[c] / dv, size += std::fabs(x[c]) / dv, mean_e += e[c] / dv;
        if (p.kind == norm::group)
          for (size_t c = 0; c < x.size(); ++c) x[c] -= mean, e[c] += mean_e + grown(p.dv) * size;
        for (size_t c = 0; c < x.size(); ++c) square += x[c] * x[c] / dv, square_e += e[c] * e[c] / dv;
        if (p.kind != norm::none) {
          root = std::sqrt(square + p.eps), root_e = std::sqrt(square_e);
          least = std::max(root - u * root_e, std::sqrt(p.eps));
        }
        for (size_t c = 0; c < x.size(); ++c) {
          const double w = p.weight.empty() ? 1 : p.weight[c], bias = p.bias.empty() ? 0 : p.bias[c];
          const double y = root == 0 ? 0 : x[c] / root * w;
          const double y_e =
              root == 0 || std::isinf(root) ? 0 : std::fabs(w) * (e[c] + std::fabs(x[c]) * root_e / root) / least;
          r.out.add((y + bias) * p.gain, std::fabs(p.gain) * (y_e + (grown(p.dv) + 8) * std::fabs(y) + 4 * std::fabs(bias)));
        }
      }
  return r;
}

}  // namespace reference
