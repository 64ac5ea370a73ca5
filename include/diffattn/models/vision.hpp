// SPDX-License-Identifier: MIT
#pragma once

// Vision models: as many keys as queries, in pairs 2h, 2h + 1, values twice as wide; no rotation; RMS norm with weight, eps
// 1e-5; one matrix for q, k and v, in this order.

#include "layer_config.hpp"

DIFFATTN_NAMESPACE_BEGIN
namespace models {

/// timm/layers/diff_attention.py. `lambda` is vectors, or scalars with `dual_lambda`. qk_norm and scale_norm are off in the
/// result; set them to the norm that the model was built with: its default RmsNorm is norm_kind::rms with eps 1e-6, a LayerNorm
/// is norm_kind::group.
DIFFATTN_INLINE layer_config timm(const layer_shape& s, index_t depth, lambda_rule lambda = lambda_rule::vectors) noexcept {
  layer_config c;
  c.heads = head_map::interleaved(pairs(s.query_heads), pairs(s.key_heads));
  c.model_width = s.model_width, c.head_width = s.head_width, c.value_width = 2 * s.head_width;
  c.lambda = lambda, c.lambda_init = lambda_init(depth), c.gain = 1 - c.lambda_init;
  c.rotates = c.causal = false;
  return c;
}

/// DiffCLIP: timm's layer with λ_init = 0.8 in every layer. The text tower is causal, the image tower is not.
DIFFATTN_INLINE layer_config diffclip(const layer_shape& s, bool causal) noexcept {
  layer_config c = timm(s, 0);
  c.lambda_init = 0.8, c.gain = 1 - c.lambda_init;
  c.causal = causal;
  return c;
}

}  // namespace models
DIFFATTN_NAMESPACE_END
