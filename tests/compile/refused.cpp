// SPDX-License-Identifier: MIT
// Compiles as it is; with one of the macros it must not.

#include <diffattn/diffattn.hpp>

using row_tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;
using row_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline row_tensor make_tensor() {
  return row_tensor(1, 2, 3, 4);
}
inline row_matrix make_matrix() {
  return row_matrix(2, 12);
}

#if defined(COLUMN_MAJOR_TENSOR)
using tensor = Eigen::Tensor<float, 4>;
#else
using tensor = row_tensor;
#endif
#if defined(COLUMN_MAJOR_MATRIX)
using matrix = Eigen::MatrixXf;
#else
using matrix = row_matrix;
#endif
#if defined(RANK_2)
using smallest = Eigen::Tensor<float, 2, Eigen::RowMajor>;
#else
using smallest = Eigen::Tensor<float, 3, Eigen::RowMajor>;
#endif

void all_views() {
  tensor t;
  matrix m(2, 12);
  smallest s;
  (void)diffattn::view(t), (void)diffattn::view(m, 3), (void)diffattn::view(s);
#if defined(TEMPORARY_TENSOR)
  (void)diffattn::view(make_tensor());
#else
  const row_tensor kept = make_tensor();
  (void)diffattn::view(kept);
#endif
#if defined(TEMPORARY_MATRIX)
  (void)diffattn::view(make_matrix(), 3);
#else
  const row_matrix kept_matrix = make_matrix();
  (void)diffattn::view(kept_matrix, 3);
#endif
#if defined(EXPRESSION)
  (void)diffattn::view(m + m, 3);
#endif
#if defined(WRITES_TO_CONSTANT)
  const row_tensor constant = make_tensor();
  diffattn::forward_args<float> a;
  a.out = diffattn::view(constant);
#endif
}
