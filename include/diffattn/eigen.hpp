// SPDX-License-Identifier: MIT
#pragma once

// Views of Eigen objects.
//
//   view(tensor)                  Tensor or TensorMap of rank 4, RowMajor, [batch, tokens, heads, width];
//   view(tensor, layout::bhtd)    … or [batch, heads, tokens, width]
//   view(tensor3)                 rank 3 is one batch entry: [tokens, heads, width] or [heads, tokens, width]
//   view(matrix, heads, batch)    Matrix, Map, Ref, Block, Transpose: rows are the tokens of all batch entries, one after the
//                                 other; columns are heads × width
//
// Eigen::half and Eigen::bfloat16 become f16 and bf16, which lie in memory alike: nothing is converted.
//
// The channels of a head must be adjacent in memory, so column-major objects with tokens as rows are refused when compiling;
// for a column-major matrix that holds a token in each column pass `m.transpose()`.

#include <Eigen/Core>
#include <type_traits>
#include <unsupported/Eigen/CXX11/Tensor>

#include "storage.hpp"
#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

namespace eigen {

/// Our element type for Eigen's T.
template <class T>
using element = std::conditional_t<std::is_same_v<T, Eigen::half>, f16,  //
                                   std::conditional_t<std::is_same_v<T, Eigen::bfloat16>, bf16, T>>;
static_assert(sizeof(Eigen::half) == sizeof(f16) && alignof(Eigen::half) == alignof(f16));
static_assert(sizeof(Eigen::bfloat16) == sizeof(bf16) && alignof(Eigen::bfloat16) == alignof(bf16));

template <class T>
DIFFATTN_INLINE auto elements(T* data) noexcept {
  return reinterpret_cast<element<T>*>(data);
}
template <class T>
DIFFATTN_INLINE auto elements(const T* data) noexcept {
  return reinterpret_cast<const element<T>*>(data);
}

template <class T, class Dimensions>
DIFFATTN_INLINE auto row_major_view(T* data, const Dimensions& size, layout order) noexcept {
  constexpr int rank = static_cast<int>(std::tuple_size_v<std::array<int, Dimensions::count>>);
  static_assert(rank == 3 || rank == 4, "diffattn::view takes tensors of rank 4 (or rank 3 for one batch entry)");
  const index_t batch = rank == 4 ? static_cast<index_t>(size[0]) : 1;
  const index_t outer = static_cast<index_t>(size[rank - 3]), inner = static_cast<index_t>(size[rank - 2]);
  const index_t width = static_cast<index_t>(size[rank - 1]);
  const bool tokens_first = order == layout::bthd;
  return view(elements(data), batch, tokens_first ? outer : inner, tokens_first ? inner : outer, width, order);
}

}  // namespace eigen

template <class T, int Rank, int Options, class Index>
DIFFATTN_INLINE auto view(Eigen::Tensor<T, Rank, Options, Index>& t, layout order = layout::bthd) noexcept {
  static_assert(Options & Eigen::RowMajor, "diffattn::view needs a RowMajor tensor: the last index must be the contiguous one");
  return eigen::row_major_view(t.data(), t.dimensions(), order);
}
template <class T, int Rank, int Options, class Index>
DIFFATTN_INLINE auto view(const Eigen::Tensor<T, Rank, Options, Index>& t, layout order = layout::bthd) noexcept {
  static_assert(Options & Eigen::RowMajor, "diffattn::view needs a RowMajor tensor: the last index must be the contiguous one");
  return eigen::row_major_view(t.data(), t.dimensions(), order);
}
/// A temporary tensor would be gone before the call reads it.
template <class T, int Rank, int Options, class Index>
void view(const Eigen::Tensor<T, Rank, Options, Index>&& t, layout order = layout::bthd) = delete;

/// A TensorMap of `const Tensor` gives a view of constant data.
template <class Plain, int Options, template <class> class Pointer>
DIFFATTN_INLINE auto view(const Eigen::TensorMap<Plain, Options, Pointer>& t, layout order = layout::bthd) noexcept {
  using scalar = std::conditional_t<std::is_const_v<Plain>, const typename Plain::Scalar, typename Plain::Scalar>;
  static_assert(static_cast<int>(Plain::Layout) == static_cast<int>(Eigen::RowMajor),
                "diffattn::view needs a RowMajor tensor: the last index must be the contiguous one");
  return eigen::row_major_view(const_cast<scalar*>(t.data()), t.dimensions(), order);
}

namespace eigen {

/// Rows are tokens. A size that does not divide gives a view that `check` refuses.
template <class T, class Derived>
DIFFATTN_INLINE auto matrix_view(T* data, const Derived& m, index_t heads, index_t batch) noexcept {
  using result = tensor_view<std::remove_pointer_t<decltype(elements(data))>>;
  static_assert((Derived::Flags & Eigen::DirectAccessBit) != 0, "diffattn::view needs a matrix in memory, not an expression");
  static_assert(Derived::IsRowMajor || Derived::ColsAtCompileTime == 1,
                "diffattn::view needs rows that are contiguous; for one token per column pass m.transpose()");
  const index_t rows = m.rows(), columns = m.cols();
  const index_t stride =
      static_cast<index_t>(Derived::IsRowMajor ? m.outerStride() : m.innerStride());  // a column vector's rows
  if (heads <= 0 || batch <= 0 || columns % heads != 0 || rows % batch != 0)
    return result{elements(data), -1, -1, -1, 0, 0, 0, 0, 1};
  const index_t width = columns / heads, tokens = rows / batch;
  return result{elements(data),
                batch,
                tokens,
                heads,
                width,
                tokens * stride,
                stride,
                width * static_cast<index_t>(m.innerStride()),
                static_cast<index_t>(m.innerStride())};
}

}  // namespace eigen

template <class Derived>
DIFFATTN_INLINE auto view(Eigen::DenseBase<Derived>& m, index_t heads, index_t batch = 1) noexcept {
  return eigen::matrix_view(m.derived().data(), m.derived(), heads, batch);
}
/// A constant matrix gives a view of constant data; a Map, Ref or Block, often a temporary, one of what it refers to.
template <class Derived>
DIFFATTN_INLINE auto view(const Eigen::DenseBase<Derived>& m, index_t heads, index_t batch = 1) noexcept {
  using scalar = typename Derived::Scalar;
  constexpr bool owns = std::is_base_of_v<Eigen::PlainObjectBase<Derived>, Derived>;
  constexpr bool writable = !owns && (static_cast<int>(Derived::Flags) & static_cast<int>(Eigen::LvalueBit)) != 0;
  using pointer = std::conditional_t<writable, scalar, const scalar>*;
  return eigen::matrix_view(const_cast<pointer>(m.derived().data()), m.derived(), heads, batch);
}
/// A temporary matrix would be gone before the call reads it. Temporary Maps, Refs and Blocks are fine as long as what they
/// refer to lives on, which nobody can check here.
template <class T, int R, int C, int O, int MR, int MC>
void view(const Eigen::Matrix<T, R, C, O, MR, MC>&& m, index_t heads, index_t batch = 1) = delete;
template <class T, int R, int C, int O, int MR, int MC>
void view(const Eigen::Array<T, R, C, O, MR, MC>&& m, index_t heads, index_t batch = 1) = delete;

DIFFATTN_NAMESPACE_END
