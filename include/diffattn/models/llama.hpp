// SPDX-License-Identifier: MIT
#pragma once

// Hugging Face LlamaForCausalLM and its differential twin DiffLlamaForCausalLM: the same projections, rotation and cache.

#include "layer_config.hpp"

DIFFATTN_NAMESPACE_BEGIN
namespace models {

/// Standard attention (modeling_llama.py).
DIFFATTN_INLINE layer_config llama(const layer_shape& s) noexcept {
  layer_config c;
  c.heads = head_map::single(s.query_heads, s.key_heads);
  c.model_width = s.model_width, c.head_width = c.value_width = s.head_width;
  c.lambda = lambda_rule::none;
  c.norm = norm_kind::none, c.norm_weight = false;
  return c;
}

/// modeling_diffllama.py: query head h pairs with head h + half of them, after keys and values were repeated; both maps read
/// the values of both. RMS norm without weight, its eps that of all norms of the model (rms_norm_eps). λ_init counts layers
/// from 0.
DIFFATTN_INLINE layer_config diffllama(const layer_shape& s, index_t layer, double rms_norm_eps = 1e-5) noexcept {
  layer_config c = llama(s);
  c.heads = head_map::halves(pairs(s.query_heads), s.key_heads);
  c.lambda = lambda_rule::vectors;
  c.lambda_init = lambda_init(layer), c.gain = 1 - c.lambda_init;
  c.norm = norm_kind::rms, c.norm_eps = rms_norm_eps;
  return c;
}

}  // namespace models
DIFFATTN_NAMESPACE_END
