// SPDX-License-Identifier: MIT
#pragma once

// The factor λ of the second map: its initialisation schedule, the rules that make it from learned parameters, and the view
// through which a call reads it. Nothing here clamps: λ may be negative or above 1, and trained models use both.

#include <cmath>

#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// What the number given to `lambda_init` means.
enum class layer_index {
  zero_based,  ///< first layer = 0: microsoft/unilm, DiffLlama, timm; Phi-4-mini-flash (counting layers of every kind)
  one_based,   ///< first layer = 1: the paper's l (arXiv 2410.05258, section 2.1)
  zero_based_minus_one,  ///< first layer = 0 but used as -1: Motif-2.6B and Motif-2-12.7B, whose first λ_init is negative
};

/// λ_init(l) = 0.8 - 0.6 exp(-0.3 l), l = 0 for the first layer (arXiv 2410.05258, section 2.1): 0.2, 0.3555, 0.4707, …, 0.8.
/// Models with a constant λ_init (DiffCLIP: 0.8) or a stored one pass their number instead of calling this.
DIFFATTN_INLINE double lambda_init(index_t layer, layer_index convention = layer_index::zero_based) noexcept {
  const double l = static_cast<double>(layer) - (convention == layer_index::zero_based ? 0.0 : 1.0);
  return 0.8 - 0.6 * std::exp(-0.3 * l);
}

/// λ = exp(a) - exp(b) + λ_init for two learned scalars (timm, `dual_lambda`).
DIFFATTN_INLINE double lambda_from_scalars(double a, double b, double init) noexcept {
  return std::exp(a) - std::exp(b) + init;
}

/// λ = exp(λq1·λk1) - exp(λq2·λk2) + λ_init for four learned vectors [width] (arXiv 2410.05258, equation 2). Computed in
/// double; the published models round the two exponentials to their activation type first, which moves λ by up to 2^-8.
template <class T>
DIFFATTN_INLINE double lambda_from_vectors(const T* q1, const T* k1, const T* q2, const T* k2, index_t width,
                                           double init) noexcept {
  double dot_1 = 0, dot_2 = 0;
  for (index_t i = 0; i < width; ++i) {
    dot_1 += static_cast<double>(q1[i]) * static_cast<double>(k1[i]);
    dot_2 += static_cast<double>(q2[i]) * static_cast<double>(k2[i]);
  }
  return lambda_from_scalars(dot_1, dot_2, init);
}

/// λ = sigmoid(gate logit), the rule of version 2 (multihead_flashdiffv2.py) and Motif-3.
DIFFATTN_INLINE double lambda_from_gate(double logit) noexcept {
  return 1.0 / (1.0 + std::exp(-logit));
}

/// A coefficient as a call reads it: one number, one per head, or one per batch entry, token and head. Converts from a
/// number; a default-constructed one is "not given", which `check` refuses.
template <class T>
class lambda_view {
 public:
  static constexpr index_t any = -1;

  DIFFATTN_INLINE constexpr lambda_view() noexcept = default;
  DIFFATTN_INLINE constexpr lambda_view(T number) noexcept : kind_(kind::number), number_(number) {}  // NOLINT: a number is a λ

  /// One number per differential head: [heads].
  static DIFFATTN_INLINE lambda_view per_head(const T* data) noexcept { return {{data, 0, 0, 1}, any, any, false}; }
  /// [batch, tokens, heads], contiguous; tokens are the query tokens, heads the differential heads.
  static DIFFATTN_INLINE lambda_view per_token(const T* data, index_t tokens, index_t heads) noexcept {
    return {{data, tokens * heads, heads, 1}, tokens, heads, false};
  }
  /// Gate logits [batch, tokens, heads], contiguous; the call takes their sigmoid.
  static DIFFATTN_INLINE lambda_view gate(const T* logits, index_t tokens, index_t heads) noexcept {
    return {{logits, tokens * heads, heads, 1}, tokens, heads, true};
  }
  /// Any strides, 0 broadcasts; `gate` as above.
  static DIFFATTN_INLINE lambda_view strided(token_head_view<const T> v, bool gate = false) noexcept {
    return {v, any, any, gate};
  }

  DIFFATTN_INLINE bool is_given() const noexcept { return kind_ == kind::number || array_.data != nullptr; }
  /// The array behind it; data is null for a number.
  DIFFATTN_INLINE const token_head_view<const T>& array() const noexcept { return array_; }
  /// Was it made for this many tokens and heads?
  DIFFATTN_INLINE bool fits(index_t tokens, index_t heads) const noexcept {
    return (tokens_ == any || tokens_ == tokens) && (heads_ == any || heads_ == heads);
  }

  /// The coefficient of query token t in differential head h, the gate applied.
  DIFFATTN_INLINE T at(index_t b, index_t t, index_t h) const noexcept {
    const T x = kind_ == kind::array ? array_.at(b, t, h) : number_;
    return is_gate_ ? static_cast<T>(lambda_from_gate(static_cast<double>(x))) : x;
  }

 private:
  enum class kind { missing, number, array };

  DIFFATTN_INLINE lambda_view(token_head_view<const T> v, index_t tokens, index_t heads, bool gate) noexcept
      : kind_(kind::array), is_gate_(gate), array_(v), tokens_(tokens), heads_(heads) {}

  kind kind_ = kind::missing;
  bool is_gate_ = false;
  T number_ = T(0);
  token_head_view<const T> array_;
  index_t tokens_ = any, heads_ = any;
};

DIFFATTN_NAMESPACE_END
