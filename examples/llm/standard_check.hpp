// SPDX-License-Identifier: MIT
#pragma once

// The attention layers of a model once more, the way the published PyTorch code does it: each map by a call of standard
// attention, then difference, norm and gain, each with a pass over memory. Standard layers are recomputed as differential ones
// with λ = 0.

#include "decoder.hpp"

namespace llm {

/// How far an attention layer's output, relative to its root mean square, lies from the recomputed one. `args` must have run on
/// all tokens of its sequence in one call. Throws std::invalid_argument for an odd number of key heads in a differential model,
/// where the two narrow values of a head are no rearrangement of heads.
inline double standard_difference(const decoder::layer_args& args) {
  const diffattn::layer_config& c = args.config;
  const bool differential = c.lambda != diffattn::lambda_rule::none;
  const index_t n = args.x.tokens, d = c.head_width, width = c.model_width;
  const index_t heads = differential ? 2 * c.heads.heads : c.heads.heads, kv = c.heads.kv, half = heads / 2;
  if (differential && kv % 2 != 0) throw std::invalid_argument("the check needs an even number of key heads");

  const Eigen::Map<const matrix> x(args.x.data, n, width);
  const auto project = [](const auto& in, const diffattn::linear<float>& l, index_t outputs) {
    matrix y = in * Eigen::Map<const matrix>(l.weight, outputs, in.cols()).transpose();
    if (l.bias) y.rowwise() += Eigen::Map<const Eigen::RowVectorXf>(l.bias, outputs);
    return y;
  };
  matrix q = project(x, args.weights.q, heads * d), k = project(x, args.weights.k, kv * d),
         v = project(x, args.weights.v, kv * d);
  throw_if_error(rotate(args.rope, diffattn::view(q, heads), diffattn::view(q, heads)));
  throw_if_error(rotate(args.rope, diffattn::view(k, kv), diffattn::view(k, kv)));

  diffattn::attention_args<float> call;
  call.q = diffattn::view(std::as_const(q), heads), call.k = diffattn::view(std::as_const(k), kv);
  call.mask.causal = true;
  // All heads attend to `values`; head h reads value head h / (heads / kv).
  const auto attend = [&](const matrix& values) {
    matrix out(n, heads * d);
    call.v = diffattn::view(values, kv), call.out = diffattn::view(out, heads);
    diffattn::attention(call);
    return out;
  };

  matrix result(n, heads * d);
  if (differential) {
    // A head pair reads the values of both its heads: those of its own, and those of the heads half of them away.
    matrix swapped(n, kv * d);
    swapped << v.rightCols(kv / 2 * d), v.leftCols(kv / 2 * d);
    const matrix own = attend(v), other = attend(swapped);
    const auto args_of = to_forward_args(c, args.weights);
    const float lambda = args_of.lambda.at(0, 0, 0);
    for (index_t h = 0; h < half; ++h) {
      auto out = result.middleCols(h * 2 * d, 2 * d);
      out.leftCols(d) = own.middleCols(h * d, d) - lambda * other.middleCols((h + half) * d, d);
      out.rightCols(d) = other.middleCols(h * d, d) - lambda * own.middleCols((h + half) * d, d);
      for (index_t t = 0; t < n; ++t)
        out.row(t) *= args_of.norm.gain / std::sqrt(out.row(t).squaredNorm() / static_cast<float>(2 * d) + args_of.norm.eps);
    }
  } else {
    diffattn::forward_args<float> zero = to_forward_args(c, args.weights);
    zero.q = call.q, zero.k = call.k, zero.v = diffattn::view(std::as_const(v), kv), zero.out = diffattn::view(result, heads);
    diffattn::forward(zero);
  }
  const matrix expected = project(result, args.weights.out, width);
  const Eigen::Map<const matrix> found(args.out.data, n, width);
  const double rms = std::sqrt(static_cast<double>(expected.squaredNorm()) / static_cast<double>(expected.size()));
  const double difference = static_cast<double>((found - expected).cwiseAbs().maxCoeff());
  return rms > 0 ? difference / rms : difference;
}

}  // namespace llm
