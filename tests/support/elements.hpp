// SPDX-License-Identifier: MIT
#pragma once

// Numbers as elements of tensors and back. The 16-bit types are rounded by Eigen, which shares nothing with the library.

#include <Eigen/Core>
#include <cstdint>
#include <diffattn/storage.hpp>
#include <type_traits>
#include <vector>

namespace test {

template <class T>
inline constexpr bool is_16_bit = std::is_same_v<T, diffattn::f16> || std::is_same_v<T, diffattn::bf16>;

/// The type of Eigen with the same bits.
template <class T>
using eigen_type = std::conditional_t<std::is_same_v<T, diffattn::f16>, Eigen::half, Eigen::bfloat16>;

template <class T>
T element(double x) {
  if constexpr (is_16_bit<T>)
    return {Eigen::numext::bit_cast<std::uint16_t>(static_cast<eigen_type<T>>(static_cast<float>(x)))};
  else
    return static_cast<T>(x);
}

template <class T>
double number(T x) {
  if constexpr (is_16_bit<T>)
    return static_cast<double>(static_cast<float>(Eigen::numext::bit_cast<eigen_type<T>>(x.bits)));
  else
    return static_cast<double>(x);
}

/// Unit roundoff of T, twice.
template <class T>
constexpr double epsilon() {
  return std::is_same_v<T, diffattn::f16>    ? 0x1p-10
         : std::is_same_v<T, diffattn::bf16> ? 0x1p-7
         : std::is_same_v<T, float>          ? 0x1p-23
                                             : 0x1p-52;
}

}  // namespace test
