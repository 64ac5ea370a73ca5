// SPDX-License-Identifier: MIT
#pragma once

// y = x Wᵀ + b by Eigen, the only place where a layer meets it. Eigen's own symbols carry no instruction set: a program that
// links objects of different -m flags keeps this header in one of them. With up to few_rows rows nothing is allocated; with
// more, Eigen takes its packing buffers from the stack up to EIGEN_STACK_ALLOCATION_LIMIT, else from the heap.

#include <Eigen/Core>

#include "layer_config.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace layers {

/// Rows of a matrix, evenly spaced.
template <class T>
struct rows_of {
  T* data;
  index_t stride;
};

/// One of the products that share an input.
template <class T>
struct projection {
  linear<T> layer;
  index_t outputs;  ///< 0: not there
  rows_of<T> y;
};

/// Channels of one task: Eigen packs x anew for each, 1/128 of the multiplications; a matrix of 4096 still makes 32 tasks.
inline constexpr index_t slice = 128;

/// Rows up to which each is a product of its own, with the slice of W in cache from the second on: a row has the same bits as
/// alone, and 2 rows take 0.34 of the time of Eigen's matrix product, 8 rows 0.66, 16 rows 0.94 (1024 x 1024, AVX-512).
inline constexpr index_t few_rows = 8;

/// All products of x [rows, inputs]. Cut into tasks by output channels only, in the same way for any number of workers: so the
/// bits do not depend on it.
template <class T, int N, class Executor>
inline void project(rows_of<const T> x, index_t rows, index_t inputs, const projection<T> (&products)[N], Executor& executor) {
  using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using row = Eigen::Matrix<T, 1, Eigen::Dynamic>;
  index_t tasks = 0;
  for (const projection<T>& p : products) tasks += (p.outputs + slice - 1) / slice;
  executor.run(tasks, [&](index_t task, index_t) {
    const projection<T>* p = products;
    for (; task >= (p->outputs + slice - 1) / slice; ++p) task -= (p->outputs + slice - 1) / slice;
    const index_t first = task * slice, n = p->outputs - first < slice ? p->outputs - first : slice;
    const Eigen::Map<const matrix, 0, Eigen::OuterStride<>> in(x.data, rows, inputs, Eigen::OuterStride<>(x.stride));
    const Eigen::Map<const matrix> w(p->layer.weight + first * inputs, n, inputs);
    Eigen::Map<matrix, 0, Eigen::OuterStride<>> y(p->y.data + first, rows, n, Eigen::OuterStride<>(p->y.stride));
    if (rows <= few_rows)
      for (index_t r = 0; r < rows; ++r) y.row(r).noalias() = in.row(r) * w.transpose();
    else
      y.noalias() = in * w.transpose();
    if (p->layer.bias) y.rowwise() += Eigen::Map<const row>(p->layer.bias + first, n);
  });
}

/// y · sigmoid(gate), n numbers.
template <class T>
inline void apply_gate(T* y, const T* gate, index_t n) {
  using array = Eigen::Array<T, Eigen::Dynamic, 1>;
  Eigen::Map<array>(y, n) /= T(1) + (-Eigen::Map<const array>(gate, n)).exp();
}

}  // namespace layers
DIFFATTN_ISA_NAMESPACE_END
