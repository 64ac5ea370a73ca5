// SPDX-License-Identifier: MIT
#pragma once

// A whole attention layer in double, one loop for each sum, sharing nothing with the library. As in reference.hpp a bound for
// the error of a computation with unit roundoff u stands beside each number, in units of u. Errors e of the numbers that a sum
// reads are independent as well: their squares add up.
//
//   y = x Wᵀ + b     √Σ (e(x) w)², and 4 √(inputs + 1) (Σ |x w| + |b|)
//   rotation         e(x1) |cos| + e(x2) |sin|, and 4 √3 (|x1 cos| + |x2 sin|)
//   attention        its own; where no logit moves by more than D, no weight grows by more than exp(2D): so the mean of v moves
//                    by (exp(2D) - 1) Σ weight |v|, and by the mean of e(v)
//   sigmoid s of g   s (1 - s) e(g)
//   norm             as in reference.hpp

#include "reference.hpp"

namespace reference {

struct dense {
  std::vector<double> weight, bias;  // [outputs][inputs], [outputs]; no bias: empty
};

struct row_norm {
  norm kind = norm::none;
  double eps = 0, gain = 1;
  std::vector<double> weight, bias;  // empty: 1 and 0
};

struct rotation {
  bool half = false;            // channels i and i + width / 2 are a pair, else 2i and 2i + 1
  long width = 0, first = 0;    // rotating channels, 0: none; position of the first row
  std::vector<float> cos, sin;  // [positions][width / 2]
};

struct layer {
  long model_width = 0, d = 0, width = 0;  // channels of a token, a key head, a value head
  long q_heads = 0, k_heads = 0, v_heads = 0;
  std::vector<head> heads;
  dense q, k, v, out, lambda_gate, alpha_gate, output_gate;  // gates: empty if there are none
  bool one_map = false;
  std::vector<double> lambda[4];  // exp(0 · 1) - exp(2 · 3), unless a gate is given
  double lambda_init = 0, lambda_factor = 1;
  row_norm q_norm, k_norm, head_norm, scale_norm;
  rotation rope;
  bool causal = false;
  long window = 0;  // 0: no window
  double scale = 1;
};

/// Hidden states [batch][tokens][model width], the position of each entry's first token, its keys (empty: all), and u.
struct layer_call {
  long batch = 1, tokens = 0;
  std::vector<double> x;
  std::vector<long> positions, first, last;
  double u = 0;
};

/// [batch][kv_len][heads][width], keys rotated.
struct keys_and_values {
  long kv_len = 0;
  numbers k, v;
};

namespace steps {

inline double grown(long roundings) {
  return 4 * std::sqrt(double(roundings));
}
inline double square(double x) {
  return x * x;
}
inline double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

inline numbers project(const numbers& x, long inputs, const dense& w) {
  const size_t n = size_t(inputs), outputs = w.weight.size() / n;
  numbers y;
  for (size_t row = 0; row < x.value.size() / n; ++row)
    for (size_t o = 0; o < outputs; ++o) {
      double sum = w.bias.empty() ? 0 : w.bias[o], size = std::fabs(sum), error = 0;
      for (size_t i = 0; i < n; ++i) {
        const double a = x.value[row * n + i], b = w.weight[o * n + i];
        sum += a * b, size += std::fabs(a * b), error += square(x.error[row * n + i] * b);
      }
      y.add(sum, std::sqrt(error) + grown(inputs + 1) * size);
    }
  return y;
}

/// Each row of n numbers.
inline numbers normalise(const numbers& x, long n, const row_norm& by, double u) {
  numbers y;
  const double count = double(n);
  for (size_t row = 0; row < x.value.size(); row += size_t(n)) {
    std::vector<double> a(x.value.begin() + long(row), x.value.begin() + long(row) + n);
    std::vector<double> e(x.error.begin() + long(row), x.error.begin() + long(row) + n);
    double mean = 0, size = 0, mean_e = 0, square = 0, square_e = 0, root = 1, root_e = 0, least = 1;
    for (size_t c = 0; c < a.size(); ++c) mean += a[c] / count, size += std::fabs(a[c]) / count, mean_e += e[c] / count;
    if (by.kind == norm::group)
      for (size_t c = 0; c < a.size(); ++c) a[c] -= mean, e[c] += mean_e + grown(n) * size;
    for (size_t c = 0; c < a.size(); ++c) square += a[c] * a[c] / count, square_e += e[c] * e[c] / count;
    if (by.kind != norm::none) {
      root = std::sqrt(square + by.eps), root_e = std::sqrt(square_e);
      least = std::max(root - u * root_e, std::sqrt(by.eps));
    }
    for (size_t c = 0; c < a.size(); ++c) {
      const double w = by.weight.empty() ? 1 : by.weight[c], bias = by.bias.empty() ? 0 : by.bias[c];
      const double value = a[c] / root * w, error = std::fabs(w) * (e[c] + std::fabs(a[c]) * root_e / root) / least;
      y.add((value + bias) * by.gain, std::fabs(by.gain) * (error + (grown(n) + 8) * std::fabs(value) + 4 * std::fabs(bias)));
    }
  }
  return y;
}

inline void rotate(const rotation& r, const layer_call& c, long heads, long d, numbers& x) {
  const long pairs = r.width / 2;
  for (long b = 0; b < c.batch; ++b)
    for (long t = 0; t < c.tokens; ++t)
      for (long h = 0; h < heads; ++h)
        for (long i = 0; i < pairs; ++i) {
          const size_t row = size_t(((b * c.tokens + t) * heads + h) * d);
          const size_t one = row + size_t(r.half ? i : 2 * i), two = row + size_t(r.half ? i + pairs : 2 * i + 1);
          const size_t angle = size_t((c.positions[size_t(b)] + t - r.first) * pairs + i);
          const double cos = double(r.cos[angle]), sin = double(r.sin[angle]);
          const auto turn = [&](size_t to, double x1, double e1, double x2, double e2) {
            x.value[to] = x1 * cos + x2 * sin;
            x.error[to] = e1 * std::fabs(cos) + e2 * std::fabs(sin) + grown(3) * (std::fabs(x1 * cos) + std::fabs(x2 * sin));
          };
          const double a = x.value[one], a_error = x.error[one], z = x.value[two], z_error = x.error[two];
          turn(one, a, a_error, -z, z_error), turn(two, z, z_error, a, a_error);
        }
}

/// Factors of one map, [batch][tokens][heads].
inline numbers factors(const layer& l, const layer_call& c, const dense& gate, double otherwise, double error) {
  numbers f;
  if (gate.weight.empty()) {
    for (size_t i = 0; i < size_t(c.batch * c.tokens) * l.heads.size(); ++i) f.add(otherwise, error);
    return f;
  }
  const numbers logits = project({c.x, std::vector<double>(c.x.size())}, l.model_width, gate);
  for (size_t i = 0; i < logits.value.size(); ++i) {
    const double s = sigmoid(logits.value[i]);
    f.add(s, s * (1 - s) * logits.error[i] + 2 * s);
  }
  return f;
}

/// Both computed in double and then rounded to u.
inline void lambda(const layer& l, double u, double& value, double& error) {
  if (l.one_map || l.lambda[0].empty()) return;
  double term[2] = {0, 0}, term_error[2] = {0, 0};
  for (size_t m = 0; m < 2; ++m) {
    double size = 0;
    for (size_t i = 0; i < l.lambda[2 * m].size(); ++i) {
      const double product = l.lambda[2 * m][i] * l.lambda[2 * m + 1][i];
      term[m] += product, size += std::fabs(product);
    }
    term[m] = std::exp(term[m]), term_error[m] = term[m] * (grown(long(l.lambda[0].size())) * size + 8);
  }
  value = l.lambda_factor * (term[0] - term[1] + l.lambda_init);
  error = std::fabs(value) + std::fabs(l.lambda_factor) * (term_error[0] + term_error[1]) * 0x1p-53 / u;
}

/// The difference of the maps times v, [batch][tokens][heads][output width].
inline numbers attend(const layer& l, const layer_call& c, const numbers& q, const keys_and_values& kv) {
  problem<double> p;
  p.batch = c.batch, p.q_len = c.tokens, p.kv_len = kv.kv_len, p.d = l.d, p.dv = l.heads[0].v2 < 0 ? l.width : 2 * l.width;
  const auto strides = [](const std::vector<double>& x, long tokens, long heads, long width) {
    return tensor<double>{x.data(), tokens * heads * width, heads * width, width};
  };
  p.q = strides(q.value, c.tokens, l.q_heads, l.d), p.k = strides(kv.k.value, kv.kv_len, l.k_heads, l.d);
  p.heads = l.heads, p.scale = l.scale;
  p.causal = l.causal, p.offset = kv.kv_len - c.tokens, p.window = l.window, p.first = c.first, p.last = c.last;
  double number = 0, number_error = 0;
  lambda(l, c.u, number, number_error);
  const numbers f[2] = {factors(l, c, l.alpha_gate, 1, 0), factors(l, c, l.lambda_gate, number, number_error)};
  for (int m = 0; m < 2; ++m) p.factor[m] = f[m].value;
  const auto with = [&](const std::vector<double>& v) {
    p.v = strides(v, kv.kv_len, l.v_heads, l.width);
    return attention(p);
  };
  std::vector<double> sizes;
  for (const double v : kv.v.value) sizes.push_back(std::fabs(v));
  const result r = with(kv.v.value), size = with(sizes), moved = with(kv.v.error);

  numbers out = r.diff;
  const tensor<double> q_error = strides(q.error, c.tokens, l.q_heads, l.d);
  const tensor<double> k_error = strides(kv.k.error, kv.kv_len, l.k_heads, l.d);
  for (size_t row = 0; row < f[0].value.size(); ++row)
    for (size_t m = 0; m < 2; ++m) {
      const long n = long(l.heads.size()), h = long(row) % n, t = long(row) / n % c.tokens, b = long(row) / n / c.tokens;
      const long qh = l.heads[size_t(h)].q[m], kh = l.heads[size_t(h)].k[m];
      double most = 0;
      for (long j = 0; j < kv.kv_len; ++j) {
        if (!p.allowed(b, t, j)) continue;
        double move = 0;
        for (long i = 0; i < l.d; ++i)
          move += square(q_error(b, t, qh, i) * (std::fabs(p.k(b, j, kh, i)) + c.u * k_error(b, j, kh, i))) +
                  square(p.q(b, t, qh, i) * k_error(b, j, kh, i));
        most = std::max(most, std::fabs(l.scale) * std::sqrt(move));
      }
      const double grow = std::expm1(2 * c.u * most) / c.u;
      for (size_t i = row * size_t(p.dv); i < (row + 1) * size_t(p.dv); ++i)
        out.error[i] += std::fabs(f[m].value[row]) * (grow * size.av[m].value[i] + (1 + c.u * grow) * moved.av[m].value[i]) +
                        f[m].error[row] * std::fabs(r.av[m].value[i]);
    }
  return out;
}

}  // namespace steps

/// The keys and values of a call's own tokens.
inline keys_and_values project_keys(const layer& l, const layer_call& c) {
  const numbers x{c.x, std::vector<double>(c.x.size())};
  keys_and_values kv{c.tokens, steps::normalise(steps::project(x, l.model_width, l.k), l.d, l.k_norm, c.u),
                     steps::project(x, l.model_width, l.v)};
  steps::rotate(l.rope, c, l.k_heads, l.d, kv.k);
  return kv;
}

/// The call on these keys and values: hidden states [batch][tokens][model width].
inline numbers run(const layer& l, const layer_call& c, const keys_and_values& kv) {
  const numbers x{c.x, std::vector<double>(c.x.size())};
  numbers q = steps::normalise(steps::project(x, l.model_width, l.q), l.d, l.q_norm, c.u);
  steps::rotate(l.rope, c, l.q_heads, l.d, q);
  const long dv = l.heads[0].v2 < 0 ? l.width : 2 * l.width, channels = dv * long(l.heads.size());
  numbers y = steps::normalise(steps::attend(l, c, q, kv), dv, l.head_norm, c.u);
  if (!l.output_gate.weight.empty()) {
    const numbers gate = steps::project(x, l.model_width, l.output_gate);
    for (size_t i = 0; i < y.value.size(); ++i) {
      const double s = steps::sigmoid(gate.value[i]);
      y.error[i] = s * (y.error[i] + std::fabs(y.value[i]) * ((1 - s) * gate.error[i] + 8));
      y.value[i] *= s;
    }
  }
  return steps::project(steps::normalise(y, channels, l.scale_norm, c.u), channels, l.out);
}

inline numbers run(const layer& l, const layer_call& c) {
  return run(l, c, project_keys(l, c));
}

}  // namespace reference
