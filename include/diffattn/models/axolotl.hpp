// SPDX-License-Identifier: MIT
#pragma once

// axolotl-ai-cloud/diff-transformer: Llamas converted into differential models. The first half of the channels of q and k is
// map 1, the second half map 2; half-rotated. λ_init is a tensor of the checkpoint (0 if the conversion changed nothing at
// first): read it, do not compute it. No gain: it would not preserve the converted model.

#include "layer_config.hpp"

DIFFATTN_NAMESPACE_BEGIN
namespace models {

/// What the converter was told.
struct axolotl_options {
  bool split_heads = true;  ///< heads were paired; else q and k were doubled, and both maps read one value of single width
  double lambda_init = 0;   ///< as stored
  double mix = 1;           ///< `diff_attn_mix`, which rises to 1 during training
  bool sub_norm = true;
  double rms_norm_eps = 1e-5;
};

DIFFATTN_INLINE layer_config axolotl(const layer_shape& s, const axolotl_options& o) noexcept {
  layer_config c;
  c.heads = head_map::component_major(pairs(s.query_heads), pairs(s.key_heads),
                                      o.split_heads ? value_layout::distant : value_layout::wide);
  c.model_width = s.model_width, c.head_width = c.value_width = s.head_width;
  c.lambda_init = o.lambda_init, c.lambda_factor = o.mix;
  c.norm = o.sub_norm ? norm_kind::rms : norm_kind::none, c.norm_weight = o.sub_norm, c.norm_eps = o.rms_norm_eps;
  return c;
}

}  // namespace models
DIFFATTN_NAMESPACE_END
