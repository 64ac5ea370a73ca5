// SPDX-License-Identifier: MIT

#include <gtest/gtest.h>

#include <cmath>
#include <diffattn/lambda.hpp>
#include <limits>
#include <type_traits>

namespace {

using diffattn::lambda_view;
using diffattn::layer_index;

TEST(Lambda, E67_InitOfTheConventions) {
  const double first_layers[] = {0.2, 0.3555091, 0.4707130};
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_NEAR(diffattn::lambda_init(layer), first_layers[layer], 1e-7);
    EXPECT_EQ(diffattn::lambda_init(layer + 1, layer_index::one_based), diffattn::lambda_init(layer));
    EXPECT_EQ(diffattn::lambda_init(layer + 1, layer_index::zero_based_minus_one), diffattn::lambda_init(layer));
  }
  EXPECT_NEAR(diffattn::lambda_init(0, layer_index::zero_based_minus_one), -0.0099153, 1e-7);
  EXPECT_EQ(diffattn::lambda_init(10000), 0.8);
}

TEST(Lambda, E68_FromVectors) {
  const float q1[] = {std::log(2.0f)}, k1[] = {1}, zero[] = {0};
  EXPECT_NEAR(diffattn::lambda_from_vectors(q1, k1, zero, zero, 1, diffattn::lambda_init(0)), 1.2, 1e-7);
  const double none[8] = {};
  EXPECT_EQ(diffattn::lambda_from_vectors(none, none, none, none, 8, 0.3), 0.3);
  const double a[] = {0.5, -1, 2}, b[] = {0.25, 0.5, 0.125}, c[] = {1, 1, -1}, d[] = {0.5, 0.25, 0.5};
  EXPECT_DOUBLE_EQ(diffattn::lambda_from_vectors(a, b, c, d, 3, 0.2), std::exp(-0.125) - std::exp(0.25) + 0.2);
}

TEST(Lambda, FromScalars) {
  EXPECT_DOUBLE_EQ(diffattn::lambda_from_scalars(0.3, -0.2, 0.5), std::exp(0.3) - std::exp(-0.2) + 0.5);
  EXPECT_LT(diffattn::lambda_from_scalars(0, 2, 0.2), 0);  // nothing clamps
  EXPECT_GT(diffattn::lambda_from_scalars(1, 0, 0.2), 1);
}

TEST(Lambda, FromGate) {
  EXPECT_EQ(diffattn::lambda_from_gate(0), 0.5);
  EXPECT_NEAR(diffattn::lambda_from_gate(std::log(3.0)), 0.75, 1e-15);
  EXPECT_NEAR(diffattn::lambda_from_gate(-std::log(3.0)), 0.25, 1e-15);
  EXPECT_EQ(diffattn::lambda_from_gate(1e4), 1);
  EXPECT_EQ(diffattn::lambda_from_gate(-1e4), 0);  // exp overflows, its inverse is 0
  EXPECT_TRUE(std::isnan(diffattn::lambda_from_gate(std::numeric_limits<double>::quiet_NaN())));
}

template <class T>
struct LambdaView : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(LambdaView, types);

TYPED_TEST(LambdaView, NotGivenUnlessSet) {
  lambda_view<TypeParam> view;
  EXPECT_FALSE(view.is_given());
  EXPECT_FALSE(lambda_view<TypeParam>::per_head(nullptr).is_given());
  view = TypeParam(0);  // 0 is a λ
  EXPECT_TRUE(view.is_given());
  EXPECT_EQ(view.at(5, 6, 7), TypeParam(0));
  static_assert(std::is_trivially_copyable_v<lambda_view<TypeParam>>, "views are plain data");
}

TYPED_TEST(LambdaView, Shapes) {
  using view = lambda_view<TypeParam>;
  const TypeParam data[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  EXPECT_EQ(view(TypeParam(-2.5)).at(1, 2, 3), TypeParam(-2.5));
  EXPECT_EQ(view::per_head(data).at(1, 2, 3), 3);
  EXPECT_EQ(view::per_token(data, 3, 2).at(1, 2, 1), 11);  // [2][3][2]
  EXPECT_EQ(view::per_token(data, 3, 2).at(0, 1, 0), 2);
  EXPECT_EQ(view::strided({data, 1, 4, 0}).at(1, 2, 5), 9);
}

TYPED_TEST(LambdaView, GatesAreSigmoids) {
  using view = lambda_view<TypeParam>;
  const TypeParam logits[] = {0, static_cast<TypeParam>(std::log(3.0)), -100, 100};
  EXPECT_EQ(view::gate(logits, 2, 2).at(0, 0, 0), TypeParam(0.5));
  EXPECT_NEAR(double(view::gate(logits, 2, 2).at(0, 0, 1)), 0.75, 1e-7);
  EXPECT_NEAR(double(view::gate(logits, 2, 2).at(0, 1, 0)), std::exp(-100.0), 1e-45);  // not a normal float
  EXPECT_EQ(view::strided({logits, 0, 1, 0}, true).at(0, 3, 9), TypeParam(1));
}

}  // namespace
