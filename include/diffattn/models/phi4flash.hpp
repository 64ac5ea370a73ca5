// SPDX-License-Identifier: MIT
#pragma once

// Phi-4-mini-flash-reasoning (modeling_phi4flash.py; microsoft/ArchScale trained it): queries, keys and values in pairs 2h,
// 2h + 1; no rotation; biases; one matrix for q, k and v, in this order. λ_init counts layers of every kind from 0, so the
// attention layers of the self-decoder have 1, 3, 5, ….

#include "layer_config.hpp"

DIFFATTN_NAMESPACE_BEGIN
namespace models {

/// A layer of the self-decoder sees `window` keys, its own included (512 in the published model). The layer in the middle of
/// the model, whose keys and values the later ones read, sees all: attention_mask::unlimited.
DIFFATTN_INLINE layer_config phi4flash(const layer_shape& s, index_t absolute_layer, index_t window) noexcept {
  layer_config c;
  c.heads = head_map::interleaved(pairs(s.query_heads), pairs(s.key_heads), value_layout::adjacent);
  c.model_width = s.model_width, c.head_width = c.value_width = s.head_width;
  c.lambda_init = lambda_init(absolute_layer), c.gain = 1 - c.lambda_init;
  c.rotates = false;
  c.window = window;
  return c;
}

/// A layer of the cross-decoder: only queries are its own, keys and values are those of another layer's cache. Never a window,
/// though the configuration has one.
DIFFATTN_INLINE layer_config phi4flash_cross(const layer_shape& s, index_t absolute_layer) noexcept {
  layer_config c = phi4flash(s, absolute_layer, attention_mask::unlimited);
  c.keys = key_source::borrowed;
  return c;
}

}  // namespace models
DIFFATTN_NAMESPACE_END
