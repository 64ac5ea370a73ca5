// SPDX-License-Identifier: MIT
#pragma once

// What the examples compare with: one output row from the definition, in double, for rows that see every key up to their own.

#include <cmath>
#include <cstddef>
#include <diffattn/forward.hpp>
#include <vector>

/// Row t of differential head h in batch entry b: norm(softmax(q1 k1ᵀ / √d) v - λ softmax(q2 k2ᵀ / √d) v) · gain, for a causal
/// mask and an RMS norm without weight (or none).
inline std::vector<double> naive_row(const diffattn::forward_args<float>& a, diffattn::index_t b, diffattn::index_t t,
                                     diffattn::index_t h) {
  const auto i = a.heads[h];
  const auto last_key = t + a.k.tokens - a.q.tokens;
  std::vector<double> row(static_cast<std::size_t>(a.out.width), 0.0);
  for (const bool second : {false, true}) {
    const float* q = a.q.at(b, t, second ? i.query_2 : i.query_1);
    const double factor = second ? -static_cast<double>(a.lambda.at(b, t, h)) : 1.0;
    std::vector<double> weights;
    double sum = 0;
    for (diffattn::index_t j = 0; j <= last_key; ++j) {
      const float* k = a.k.at(b, j, second ? i.key_2 : i.key_1);
      double dot = 0;
      for (diffattn::index_t c = 0; c < a.q.width; ++c) dot += static_cast<double>(q[c]) * static_cast<double>(k[c]);
      weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(a.q.width))));
      sum += weights.back();
    }
    for (diffattn::index_t j = 0; j <= last_key; ++j)
      for (diffattn::index_t c = 0; c < a.out.width; ++c) {
        const float* v = c < a.v.width ? a.v.at(b, j, i.value_1) + c : a.v.at(b, j, i.value_2) + c - a.v.width;
        row[static_cast<std::size_t>(c)] += factor * weights[static_cast<std::size_t>(j)] / sum * static_cast<double>(*v);
      }
  }
  double scale = static_cast<double>(a.norm.gain), squares = 0;
  for (const double x : row) squares += x * x;
  if (a.norm.kind == diffattn::norm_kind::rms)
    scale /= std::sqrt(squares / static_cast<double>(a.out.width) + static_cast<double>(a.norm.eps));
  for (double& x : row) x *= scale;
  return row;
}

/// The largest difference between args.out and the definition, over all heads of a few rows.
inline double largest_difference(const diffattn::forward_args<float>& a) {
  double worst = 0;
  for (diffattn::index_t b = 0; b < a.out.batch; ++b)
    for (const diffattn::index_t t : {diffattn::index_t{0}, a.out.tokens / 2, a.out.tokens - 1})
      for (diffattn::index_t h = 0; h < a.out.heads; ++h) {
        const std::vector<double> row = naive_row(a, b, t, h);
        const float* out = a.out.at(b, t, h);
        for (std::size_t c = 0; c < row.size(); ++c) {
          const double difference = std::abs(row[c] - static_cast<double>(out[c]));
          if (!(difference <= worst)) worst = difference;  // NaN counts
        }
      }
  return worst;
}
