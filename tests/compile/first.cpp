// SPDX-License-Identifier: MIT
#include <gtest/gtest.h>

#include <type_traits>

#include "twice.hpp"

namespace {

TEST(OneDefinition, TwoFilesOfOneProgram) {
  const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  float out[4] = {};
  diffattn::forward(one_token(ones, out));
  EXPECT_NEAR(out[3], 0.75f, 1e-6f);
  EXPECT_EQ(second_file(ones), out[3]);
}

// Descriptions are plain data.
template <class T>
constexpr bool plain = std::is_trivially_copyable_v<T>&& std::is_standard_layout_v<T>;
static_assert(plain<diffattn::tensor_view<float>> && plain<diffattn::token_head_view<double>>);
static_assert(plain<diffattn::head_map> && plain<diffattn::attention_mask> && plain<diffattn::head_norm<float>>);
static_assert(plain<diffattn::forward_args<float>> && plain<diffattn::attention_args<double>>);
static_assert(sizeof(diffattn::index_t) == 8);

// The calls that return a status are noexcept.
static_assert(noexcept(diffattn::check(diffattn::forward_args<float>())));
static_assert(noexcept(diffattn::workspace_bytes(diffattn::forward_args<float>())));
static_assert(noexcept(diffattn::forward(diffattn::forward_args<float>(), diffattn::workspace())));
static_assert(noexcept(diffattn::attention(diffattn::attention_args<double>(), diffattn::workspace())));

TEST(Calls, TheConvenientOnesThrow) {
  EXPECT_THROW(diffattn::forward(diffattn::forward_args<float>()), std::invalid_argument);
  EXPECT_THROW(diffattn::attention(diffattn::attention_args<float>()), std::invalid_argument);
}

TEST(Calls, ConvenientAttention) {
  const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  float out[8] = {};
  diffattn::attention_args<float> a;
  a.q = a.k = a.v = diffattn::view(ones, 1, 1, 2, 4), a.out = diffattn::view(out, 1, 1, 2, 4);
  diffattn::attention(a);
  EXPECT_NEAR(out[7], 1.0f, 1e-6f);
}

}  // namespace
