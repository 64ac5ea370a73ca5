// SPDX-License-Identifier: MIT
#pragma once

// What happens to the output of one differential head before it is stored.

#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

enum class norm_kind {
  rms,    ///< x / sqrt(mean(x²) + eps) * weight: what every published version 1 model does under the name "group norm"
  group,  ///< (x - mean(x)) / sqrt(var(x) + eps) * weight + bias: group norm proper, one group per head
  none    ///< version 2; weight and gain still apply
};

/// Norm over the `width` channels of one head of one token, weight shared by all heads, then times `gain` (1 - λ_init in
/// version 1; arXiv 2410.05258, equation 3). The default is the RMS norm without weight.
template <class T>
struct head_norm {
  norm_kind kind = norm_kind::rms;
  T eps = T(1e-5);            ///< added to the mean square (variance), inside the root
  const T* weight = nullptr;  ///< [width], null = 1
  const T* bias = nullptr;    ///< [width], null = 0; only for norm_kind::group
  T gain = T(1);              ///< applied last, also to the bias, and by norm_kind::none

  static DIFFATTN_INLINE head_norm none() noexcept {
    head_norm n;
    n.kind = norm_kind::none;
    return n;
  }
};

DIFFATTN_NAMESPACE_END
