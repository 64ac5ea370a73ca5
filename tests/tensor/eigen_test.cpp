// SPDX-License-Identifier: MIT
// Views of Eigen objects: every element must be found where Eigen has it.

#include <gtest/gtest.h>

#include <algorithm>
#include <diffattn/eigen.hpp>
#include <diffattn/forward.hpp>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using diffattn::index_t;
using diffattn::layout;
using diffattn::tensor_view;
using diffattn::view;

using tensor_3 = Eigen::Tensor<float, 3, Eigen::RowMajor>;
using tensor_4 = Eigen::Tensor<float, 4, Eigen::RowMajor>;
using row_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using column_matrix = Eigen::MatrixXf;

/// Compares a view with `element(batch, token, head, channel)`.
template <class T, class F>
void expect_view(const tensor_view<T>& t, index_t batch, index_t tokens, index_t heads, index_t width, F&& element) {
  ASSERT_EQ(t.batch, batch);
  ASSERT_EQ(t.tokens, tokens);
  ASSERT_EQ(t.heads, heads);
  ASSERT_EQ(t.width, width);
  for (index_t b = 0; b < batch; ++b)
    for (index_t i = 0; i < tokens; ++i)
      for (index_t h = 0; h < heads; ++h)
        for (index_t c = 0; c < width; ++c)
          ASSERT_EQ(t.at(b, i, h) + c * t.width_stride, &element(b, i, h, c)) << b << " " << i << " " << h << " " << c;
}

TEST(EigenView, TensorOfRank4) {
  tensor_4 t(2, 3, 4, 5);
  expect_view(view(t), 2, 3, 4, 5, [&t](auto b, auto i, auto h, auto c) -> float& { return t(b, i, h, c); });
  expect_view(view(t, layout::bhtd), 2, 4, 3, 5, [&t](auto b, auto i, auto h, auto c) -> float& { return t(b, h, i, c); });
  static_assert(std::is_same_v<decltype(view(t)), tensor_view<float>>);
  static_assert(std::is_same_v<decltype(view(std::as_const(t))), tensor_view<const float>>);
  const tensor_4& constant = t;
  expect_view(view(constant), 2, 3, 4, 5,
              [&constant](auto b, auto i, auto h, auto c) -> const float& { return constant(b, i, h, c); });
}

TEST(EigenView, TensorOfRank3IsOneBatchEntry) {
  tensor_3 t(3, 4, 5);
  expect_view(view(t), 1, 3, 4, 5, [&t](auto, auto i, auto h, auto c) -> float& { return t(i, h, c); });
  expect_view(view(t, layout::bhtd), 1, 4, 3, 5, [&t](auto, auto i, auto h, auto c) -> float& { return t(h, i, c); });
}

TEST(EigenView, TensorMaps) {
  std::vector<float> data(120);
  Eigen::TensorMap<tensor_4> map(data.data(), 2, 3, 4, 5);
  expect_view(view(map), 2, 3, 4, 5, [&map](auto b, auto i, auto h, auto c) -> float& { return map(b, i, h, c); });
  expect_view(view(map, layout::bhtd), 2, 4, 3, 5,
              [&map](auto b, auto i, auto h, auto c) -> float& { return map(b, h, i, c); });
  static_assert(std::is_same_v<decltype(view(map)), tensor_view<float>>);
  static_assert(std::is_same_v<decltype(view(std::as_const(map))), tensor_view<float>>, "the map is constant, not its data");

  const Eigen::TensorMap<const tensor_3> constant(data.data(), 3, 4, 5);
  static_assert(std::is_same_v<decltype(view(constant)), tensor_view<const float>>);
  expect_view(view(constant), 1, 3, 4, 5, [&data](auto, auto i, auto h, auto c) -> const float& {
    return data[static_cast<std::size_t>((i * 4 + h) * 5 + c)];
  });
  // A temporary map is fine: it does not own what it shows.
  EXPECT_EQ(view(Eigen::TensorMap<tensor_3>(data.data(), 3, 4, 5)).data, data.data());
}

TEST(EigenView, TensorsOfDouble) {
  Eigen::Tensor<double, 4, Eigen::RowMajor, int> t(1, 2, 3, 4);  // another index type
  static_assert(std::is_same_v<decltype(view(t)), tensor_view<double>>);
  expect_view(view(t), 1, 2, 3, 4, [&t](auto b, auto i, auto h, auto c) -> double& {
    return t(static_cast<int>(b), static_cast<int>(i), static_cast<int>(h), static_cast<int>(c));
  });
}

TEST(EigenView, RowMajorMatrix) {
  row_matrix m(6, 20);  // 2 batch entries of 3 tokens; 4 heads of 5
  const auto element = [&m](auto b, auto i, auto h, auto c) -> float& { return m(b * 3 + i, h * 5 + c); };
  expect_view(view(m, 4, 2), 2, 3, 4, 5, element);
  expect_view(view(m, 4), 1, 6, 4, 5, element);
  static_assert(std::is_same_v<decltype(view(m, 4)), tensor_view<float>>);
  static_assert(std::is_same_v<decltype(view(std::as_const(m), 4)), tensor_view<const float>>);

  Eigen::Matrix<double, 4, 6, Eigen::RowMajor> fixed;
  expect_view(view(fixed, 3), 1, 4, 3, 2, [&fixed](auto, auto i, auto h, auto c) -> double& { return fixed(i, h * 2 + c); });
}

TEST(EigenView, MapRefAndBlock) {
  row_matrix m(6, 30);
  Eigen::Map<row_matrix> map(m.data(), 6, 30);
  expect_view(view(map, 3, 2), 2, 3, 3, 10,
              [&m](auto b, auto i, auto h, auto c) -> float& { return m(b * 3 + i, h * 10 + c); });

  Eigen::Map<row_matrix, 0, Eigen::OuterStride<>> strided(m.data(), 6, 20, Eigen::OuterStride<>(30));
  expect_view(view(strided, 2), 1, 6, 2, 10, [&m](auto, auto i, auto h, auto c) -> float& { return m(i, h * 10 + c); });

  Eigen::Ref<row_matrix> ref(m);
  expect_view(view(ref, 3), 1, 6, 3, 10, [&m](auto, auto i, auto h, auto c) -> float& { return m(i, h * 10 + c); });

  auto block = m.block(1, 10, 4, 20);
  expect_view(view(block, 2, 2), 2, 2, 2, 10,
              [&m](auto b, auto i, auto h, auto c) -> float& { return m(1 + b * 2 + i, 10 + h * 10 + c); });

  const row_matrix& constant = m;
  const auto columns = constant.middleCols(10, 10);
  expect_view(view(columns, 1), 1, 6, 1, 10, [&m](auto, auto i, auto, auto c) -> const float& { return m(i, 10 + c); });
}

TEST(EigenView, TemporaryMapsGiveWritableViews) {
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  matrix m = matrix::Zero(4, 8);
  diffattn::tensor_view<float> out = diffattn::view(Eigen::Map<matrix>(m.data(), 4, 8), 2);
  EXPECT_EQ(out.data, m.data());
  out = diffattn::view(m.rightCols(4), 2);
  EXPECT_EQ(out.data, m.data() + 4);
  EXPECT_EQ(out.token_stride, 8);
  const matrix& constant = m;
  using constant_view = diffattn::tensor_view<const float>;
  static_assert(std::is_same_v<decltype(diffattn::view(constant, 2)), constant_view>);
  static_assert(std::is_same_v<decltype(diffattn::view(constant.rightCols(4), 2)), constant_view>);
  static_assert(std::is_same_v<decltype(diffattn::view(Eigen::Map<const matrix>(m.data(), 4, 8), 2)), constant_view>);
}

TEST(EigenView, ColumnMajorMatrixTransposed) {
  column_matrix m(20, 6);  // a token in each column
  auto t = m.transpose();
  expect_view(view(t, 4, 2), 2, 3, 4, 5, [&m](auto b, auto i, auto h, auto c) -> float& { return m(h * 5 + c, b * 3 + i); });
  static_assert(std::is_same_v<decltype(view(t, 4)), tensor_view<float>>);
}

TEST(EigenView, Vectors) {
  Eigen::RowVectorXf row(12);  // one token
  expect_view(view(row, 3), 1, 1, 3, 4, [&row](auto, auto, auto h, auto c) -> float& { return row(h * 4 + c); });
  Eigen::VectorXf column(5);  // five tokens of one channel
  expect_view(view(column, 1), 1, 5, 1, 1, [&column](auto, auto i, auto, auto) -> float& { return column(i); });
}

template <class T>
class EigenViewOf16Bits : public testing::Test {};
using types_of_16_bits = testing::Types<std::pair<Eigen::half, diffattn::f16>, std::pair<Eigen::bfloat16, diffattn::bf16>>;
TYPED_TEST_SUITE(EigenViewOf16Bits, types_of_16_bits);

/// Eigen's numbers where Eigen has them, as our type of the same bits, constant where they were.
TYPED_TEST(EigenViewOf16Bits, BecomeOurTypes) {
  using theirs = typename TypeParam::first_type;
  using ours = typename TypeParam::second_type;
  const auto bits = [](const theirs& x) { return Eigen::numext::bit_cast<std::uint16_t>(x); };

  Eigen::Tensor<theirs, 4, Eigen::RowMajor> t(2, 3, 4, 5);
  for (Eigen::Index i = 0; i < t.size(); ++i) t.data()[i] = static_cast<theirs>(static_cast<float>(i) - 60.25f);
  const auto expect_bits = [&](auto&& seen) {
    ASSERT_EQ(seen.tokens, 3);
    ASSERT_EQ(seen.heads, 4);
    for (int b = 0; b < 2; ++b)
      for (int i = 0; i < 3; ++i)
        for (int h = 0; h < 4; ++h)
          for (int c = 0; c < 5; ++c) ASSERT_EQ(seen.at(b, i, h)[c].bits, bits(t(b, i, h, c)));
  };
  const Eigen::TensorMap<Eigen::Tensor<theirs, 4, Eigen::RowMajor>> map(t.data(), 2, 3, 4, 5);
  const Eigen::TensorMap<const Eigen::Tensor<theirs, 4, Eigen::RowMajor>> constant_map(t.data(), 2, 3, 4, 5);
  expect_bits(view(t)), expect_bits(view(std::as_const(t))), expect_bits(view(map)), expect_bits(view(constant_map));
  static_assert(std::is_same_v<decltype(view(t)), tensor_view<ours>>);
  static_assert(std::is_same_v<decltype(view(std::as_const(t))), tensor_view<const ours>>);
  static_assert(std::is_same_v<decltype(view(map)), tensor_view<ours>>);
  static_assert(std::is_same_v<decltype(view(constant_map)), tensor_view<const ours>>);

  using matrix = Eigen::Matrix<theirs, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  matrix m(6, 20);  // the same tokens and heads
  std::copy_n(t.data(), t.size(), m.data());
  expect_bits(view(m, 4, 2)), expect_bits(view(std::as_const(m), 4, 2));
  expect_bits(view(Eigen::Map<matrix>(m.data(), 6, 20), 4, 2)), expect_bits(view(m.middleCols(0, 20), 4, 2));
  static_assert(std::is_same_v<decltype(view(m, 4)), tensor_view<ours>>);
  static_assert(std::is_same_v<decltype(view(std::as_const(m), 4)), tensor_view<const ours>>);
  static_assert(std::is_same_v<decltype(view(m.rightCols(5), 1)), tensor_view<ours>>);
  static_assert(std::is_same_v<decltype(view(std::as_const(m).rightCols(5), 1)), tensor_view<const ours>>);
  EXPECT_EQ(view(m, 3).tokens, -1);  // 20 columns are not 3 heads
}

TEST(EigenView, SizesThatDoNotDivideAreRefused) {
  row_matrix m(6, 20);
  diffattn::forward_args<float> args;
  args.q = view(m, 3);  // 20 columns are not 3 heads
  EXPECT_EQ(check(args), diffattn::status::q_size);
  args.q = view(m, 4, 5);  // 6 rows are not 5 batch entries
  EXPECT_EQ(check(args), diffattn::status::q_size);
  args.q = view(m, 0);
  EXPECT_EQ(check(args), diffattn::status::q_size);
}

TEST(EigenView, InnerStrideIsRefused) {
  std::vector<float> data(200);
  Eigen::Map<row_matrix, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>> spread(data.data(), 4, 8, {40, 2});
  diffattn::forward_args<float> args;
  args.q = view(spread, 2);
  EXPECT_EQ(args.q.width_stride, 2);
  EXPECT_EQ(check(args), diffattn::status::q_width_stride);
}

}  // namespace
