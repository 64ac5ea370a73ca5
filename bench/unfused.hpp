// SPDX-License-Identifier: MIT
#pragma once

// Differential attention as a good engineer writes it with Eigen alone, the yardstick of the comparison: strips of 64 query
// rows, two products with all visible keys, both softmaxes in place, their difference, one product with V, the norm. It does
// exactly the multiplications of the fused kernel; what it lacks is cache blocking across these steps.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <diffattn/arguments.hpp>

namespace bench {

template <class T>
class unfused {
  using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using strided = Eigen::Map<const matrix, 0, Eigen::OuterStride<>>;
  using index_t = diffattn::index_t;

 public:
  static constexpr index_t strip_rows = 64;

  /// out for one differential head of one batch entry. Values are one wide head or two narrow ones; the mask is none or causal
  /// under a causal mask with as many keys as queries; the norm is RMS without weight.
  void head(const diffattn::forward_args<T>& a, index_t b, index_t h) {
    const diffattn::head_indices i = a.heads[h];
    const index_t n = a.q.tokens, d = a.q.width, width = a.v.width;
    const T scale = T(1) / std::sqrt(static_cast<T>(d));
    const T lambda = a.lambda.at(b, 0, h);
    for (index_t first = 0; first < n; first += strip_rows) {
      const index_t rows = std::min(strip_rows, n - first), keys = a.mask.causal ? first + rows : a.k.tokens;
      softmax(a.q.at(b, first, i.query_1), a.k.at(b, 0, i.key_1), a, rows, keys, first, scale, T(1), map_1_);
      softmax(a.q.at(b, first, i.query_2), a.k.at(b, 0, i.key_2), a, rows, keys, first, scale, lambda, map_2_);
      map_1_ -= map_2_;
      out_.resize(rows, a.out.width);
      out_.leftCols(width).noalias() = map_1_ * strided(a.v.at(b, 0, i.value_1), keys, width, stride(a.v));
      if (i.value_2 >= 0) out_.rightCols(width).noalias() = map_1_ * strided(a.v.at(b, 0, i.value_2), keys, width, stride(a.v));
      for (index_t r = 0; r < rows; ++r) {
        const T rms = std::sqrt(out_.row(r).squaredNorm() / static_cast<T>(a.out.width) + a.norm.eps);
        Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>(a.out.at(b, first + r, h), a.out.width) =
            out_.row(r).transpose().array() * (a.norm.gain / rms);
      }
    }
  }

 private:
  template <class View>
  static Eigen::OuterStride<> stride(const View& v) {
    return Eigen::OuterStride<>(v.token_stride);
  }

  /// map = weight · softmax(q kᵀ · scale), rows of one strip.
  static void softmax(const T* q, const T* k, const diffattn::forward_args<T>& a, index_t rows, index_t keys, index_t first,
                      T scale, T weight, matrix& map) {
    map.resize(rows, keys);
    map.noalias() = strided(q, rows, a.q.width, stride(a.q)) * strided(k, keys, a.k.width, stride(a.k)).transpose();
    for (index_t r = 0; r < rows; ++r) {
      const index_t visible = a.mask.causal ? first + r + 1 : keys;
      auto row = map.row(r).head(visible).array();
      row = ((row - row.maxCoeff()) * scale).exp();
      row *= weight / row.sum();
      map.row(r).tail(keys - visible).setZero();
    }
  }

  matrix map_1_, map_2_, out_;
};

}  // namespace bench
