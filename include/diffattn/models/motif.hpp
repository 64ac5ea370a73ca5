// SPDX-License-Identifier: MIT
#pragma once

// Motif: differential attention in groups, some signal heads followed by the noise head that they share (arXiv 2510.06949).

#include "layer_config.hpp"

DIFFATTN_NAMESPACE_BEGIN
namespace models {

/// Motif-2-12.7B (num_noise_heads = 8 of 40 heads) and Motif-2.6B, whose noise heads are half of the heads: keys and values in
/// pairs 2j, 2j + 1; half-rotated; RMS norm with weight (attn_rms_norm_eps). λ_init counts layers from -1 (motif.py).
DIFFATTN_INLINE layer_config motif_2(const layer_shape& s, index_t layer, index_t noise_heads) noexcept {
  layer_config c;
  const index_t signal_heads = s.query_heads - noise_heads;
  const bool whole = noise_heads > 0 && signal_heads % noise_heads == 0;
  c.heads = head_map::grouped(signal_heads, whole ? signal_heads / noise_heads : 0, pairs(s.key_heads));  // ratio 0: refused
  c.model_width = s.model_width, c.head_width = c.value_width = s.head_width;
  c.lambda_init = lambda_init(layer, layer_index::zero_based_minus_one), c.gain = 1 - c.lambda_init;
  return c;
}
DIFFATTN_INLINE layer_config motif_2p6b(const layer_shape& s, index_t layer) noexcept {
  return motif_2(s, layer, pairs(s.query_heads));
}

/// The attention of Motif-3: all heads of a group read one key and one value head; λ = sigmoid of a projection, for each token
/// and signal head; no norm, no gain; the layers with `output_gate` multiply each channel by a sigmoid. Its queries, keys and
/// values come from latent vectors and have rotated and plain channels: engines make them and use `to_forward_args`.
DIFFATTN_INLINE layer_config motif_3(const layer_shape& s, index_t noise_heads, bool output_gate) noexcept {
  layer_config c = motif_2(s, 0, noise_heads);
  c.heads = head_map::grouped_shared(c.heads.heads, c.heads.ratio, s.key_heads);
  c.lambda = lambda_rule::gate, c.lambda_init = 0, c.gain = 1;
  c.norm = norm_kind::none, c.norm_weight = false;
  c.output_gate = output_gate;
  return c;
}

}  // namespace models
DIFFATTN_NAMESPACE_END
