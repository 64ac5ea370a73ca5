// SPDX-License-Identifier: MIT
#pragma once

// The check that comes before any timing: results against double arithmetic, within its error bound.

#include <algorithm>
#include <cmath>
#include <diffattn/tensor.hpp>
#include <limits>
#include <stdexcept>
#include <string>

#include "../tests/reference/reference.hpp"

namespace bench {

using diffattn::index_t;

/// A tensor from token `first` on, as the reference reads it.
template <class T>
reference::tensor<T> reference_tensor(const diffattn::tensor_view<const T>& t, index_t first = 0) {
  return {t.at(0, first, 0), t.batch_stride, t.token_stride, t.head_stride};
}

/// The largest error of one row of one head, whose expected numbers begin at `first`; throws if it exceeds the bound.
template <class T>
double checked_error(const T* row, index_t width, const reference::numbers& expected, index_t first, const std::string& where) {
  const double unit_roundoff = static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;
  double largest = 0;
  for (index_t c = 0; c < width; ++c) {
    const std::size_t i = static_cast<std::size_t>(first + c);
    const double error = std::fabs(static_cast<double>(row[c]) - expected.value[i]);
    if (!(error <= expected.error[i] * unit_roundoff))
      throw std::runtime_error("wrong result at " + where + ": error " + std::to_string(error / unit_roundoff) + " of " +
                               std::to_string(expected.error[i]) + " unit roundoffs");
    largest = std::max(largest, error);
  }
  return largest;
}

}  // namespace bench
