// SPDX-License-Identifier: MIT

#include <gtest/gtest.h>

#include <diffattn/simd/transpose.hpp>
#include <vector>

#include "../support/random.hpp"

namespace {

namespace simd = diffattn::simd;
using diffattn::index_t;

template <class T>
struct Transpose : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Transpose, types);

template <simd::transpose_order Order, class T>
void expect_transposed(index_t rows, index_t columns, index_t src_gap, index_t dst_gap, test::random_source& random) {
  const T untouched = T(-77);
  const index_t src_stride = columns + src_gap, dst_stride = rows + dst_gap;
  const std::vector<T> src = test::normal_vector<T>(rows * src_stride + 1, random);
  std::vector<T> dst(static_cast<std::size_t>(columns * dst_stride + 2), untouched);
  const T scale = T(0.7);
  simd::transpose<Order>(src.data() + 1, src_stride, rows, columns, dst.data() + 1, dst_stride, scale);
  std::vector<T> expected(dst.size(), untouched);
  for (index_t r = 0; r < rows; ++r)
    for (index_t c = 0; c < columns; ++c)
      expected[static_cast<std::size_t>(1 + c * dst_stride + r)] =
          scale * src[static_cast<std::size_t>(1 + r * src_stride + c)];
  EXPECT_EQ(dst, expected) << rows << " x " << columns << ", strides " << src_stride << ", " << dst_stride;
}

TYPED_TEST(Transpose, EverySizeTouchesNothingElse) {
  test::random_source random(1);
  for (index_t rows = 0; rows <= 35; ++rows)
    for (index_t columns = 0; columns <= 35; ++columns) {
      const index_t src_gap = random.integer(0, 5), dst_gap = random.integer(0, 5);
      expect_transposed<simd::transpose_order::gather, TypeParam>(rows, columns, src_gap, dst_gap, random);
      expect_transposed<simd::transpose_order::scatter, TypeParam>(rows, columns, src_gap, dst_gap, random);
    }
}

}  // namespace
