// SPDX-License-Identifier: MIT
#pragma once

// microsoft/unilm, Diff-Transformer: the authors' own layers. Query and key heads lie in pairs 2h, 2h + 1; rotation
// interleaved; no biases. Their `num_heads` is half of query_heads.

#include "layer_config.hpp"

DIFFATTN_NAMESPACE_BEGIN
namespace models {

/// multihead_flashdiff_1.py and multihead_flashdiff_2.py (the same layer): a key pair serves consecutive query pairs, values
/// are half as many heads, twice as wide; λ from vectors with λ_init of the layer counted from 0; RMS norm with weight.
DIFFATTN_INLINE layer_config unilm_v1(const layer_shape& s, index_t layer) noexcept {
  layer_config c;
  c.heads = head_map::interleaved(pairs(s.query_heads), pairs(s.key_heads));
  c.model_width = s.model_width, c.head_width = s.head_width, c.value_width = 2 * s.head_width;
  c.lambda_init = lambda_init(layer), c.gain = 1 - c.lambda_init;
  c.rope = rope_style::interleaved;
  return c;
}

/// multihead_diffattn.py. With fewer key heads than query heads it is another layer than unilm_v1: key heads are repeated
/// before they are paired, so that with an even ratio both maps of a pair read one key head. Checkpoints of one do not run in
/// the other.
DIFFATTN_INLINE layer_config unilm_v1_naive(const layer_shape& s, index_t layer) noexcept {
  layer_config c = unilm_v1(s, layer);
  c.heads = head_map::interleaved_repeated(pairs(s.query_heads), pairs(s.key_heads));
  return c;
}

/// multihead_flashdiffv2.py: both queries of a pair share a key and a value head; λ = sigmoid of a projection, for each token
/// and head; no norm, no gain.
DIFFATTN_INLINE layer_config unilm_v2(const layer_shape& s) noexcept {
  layer_config c;
  c.heads = head_map::shared(pairs(s.query_heads), s.key_heads);
  c.model_width = s.model_width, c.head_width = c.value_width = s.head_width;
  c.lambda = lambda_rule::gate;
  c.norm = norm_kind::none, c.norm_weight = false;
  c.rope = rope_style::interleaved;
  return c;
}

}  // namespace models
DIFFATTN_NAMESPACE_END
