// SPDX-License-Identifier: MIT

// Differential attention of Eigen tensors, checked against the definition.

// [readme]
#include <diffattn/diffattn.hpp>

using tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;  // [batch, tokens, heads, width]

void attend(const tensor& q, const tensor& k, const tensor& v, tensor& out, int layer) {
  diffattn::forward_args<float> args;
  args.q = diffattn::view(q);  // 16 heads of width 64
  args.k = diffattn::view(k);
  args.v = diffattn::view(v);  // 8 heads of width 128
  args.out = diffattn::view(out);
  args.heads = diffattn::head_map::interleaved(8, 8);  // heads 2h and 2h + 1 are the two maps of head h
  args.lambda = 0.36f;
  args.norm.gain = static_cast<float>(1 - diffattn::lambda_init(layer));
  args.mask.causal = true;
  diffattn::forward(args);
}
// [/readme]

#include <cmath>
#include <cstdio>

using matrix = Eigen::MatrixXd;

// One head as a matrix, tokens as rows.
matrix head(const tensor& x, Eigen::Index h) {
  const Eigen::Index tokens = x.dimension(1), heads = x.dimension(2), width = x.dimension(3);
  using rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<const rows, 0, Eigen::OuterStride<>>(x.data() + h * width, tokens, width, {heads * width}).cast<double>();
}

// softmax(q kᵀ / √d) under the causal mask.
matrix attention_map(const matrix& q, const matrix& k) {
  matrix e = (q * k.transpose() / std::sqrt(static_cast<double>(q.cols()))).array().exp();
  e.triangularView<Eigen::StrictlyUpper>().setZero();
  return e.array().colwise() / e.rowwise().sum().array();
}

int main() {
  const int n = 200, layer = 3;
  tensor q(1, n, 16, 64), k(1, n, 16, 64), v(1, n, 8, 128), out(1, n, 8, 128);
  q.setRandom(), k.setRandom(), v.setRandom();
  attend(q, k, v, out, layer);

  double worst = 0;
  for (int h = 0; h < 8; ++h) {
    matrix o = (attention_map(head(q, 2 * h), head(k, 2 * h)) - 0.36 * attention_map(head(q, 2 * h + 1), head(k, 2 * h + 1))) *
               head(v, h);
    o = o.array().colwise() / (o.rowwise().squaredNorm() / 128 + matrix::Constant(n, 1, 1e-5)).array().sqrt();
    o *= 1 - diffattn::lambda_init(layer);
    worst = std::fmax(worst, (o - head(out, h)).cwiseAbs().maxCoeff());
  }
  std::printf("%d tokens, 8 heads; largest difference from the definition in double: %.1e\n", n, worst);
  return worst < 1e-5 ? 0 : 1;
}
