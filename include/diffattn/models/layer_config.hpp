// SPDX-License-Identifier: MIT
#pragma once

// What a family of models fixes about its attention layers, and where one layer keeps its numbers. The families, each in a file
// beside this one, only fill in a layer_config; layer.hpp runs it. Engines with projections of their own stop at
// `to_forward_args`, which says all that the attention call must know.

#include "../arguments.hpp"
#include "../kv_cache_config.hpp"
#include "../rope.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// Sizes of an attention layer as configuration files give them, in physical heads: those that the projections make.
struct layer_shape {
  index_t model_width = 0;  ///< channels of a token (hidden_size)
  index_t query_heads = 0;  ///< (num_attention_heads; microsoft/unilm and timm count pairs, half of it)
  index_t key_heads = 0;    ///< (num_key_value_heads)
  index_t head_width = 0;   ///< of a query or key head (head_dim)
};

namespace models {

/// Half of a number of heads; 0, which `check` refuses, of an odd one.
DIFFATTN_INLINE index_t pairs(index_t heads) noexcept {
  return heads % 2 == 0 ? heads / 2 : 0;
}

}  // namespace models

/// What λ is made of.
enum class lambda_rule {
  vectors,  ///< exp(λq1·λk1) - exp(λq2·λk2) + λ_init
  scalars,  ///< exp(a) - exp(b) + λ_init
  gate,     ///< sigmoid of a projection, per token and head
  none      ///< standard attention: there is no second map
};

/// The keys and values of a layer.
enum class key_source {
  own,      ///< projected from its input
  borrowed  ///< of another layer (Phi-4-mini-flash): nothing is projected or appended
};

/// A description of attention layers. The families set it; every field may be changed for a variant.
struct layer_config {
  head_map heads;           ///< physical heads -> differential heads
  index_t model_width = 0;  ///< channels of a token, in and out
  index_t head_width = 0;   ///< of a query or key head
  index_t value_width = 0;  ///< of a value head; the map says whether one or two of them make an output head

  lambda_rule lambda = lambda_rule::vectors;
  double lambda_init = 0;
  double lambda_factor = 1;  ///< on λ of vectors and scalars (axolotl's `diff_attn_mix`)
  bool alpha_gate = false;   ///< the first map has a gate as well: α₁ A₁ - α₂ A₂

  norm_kind norm = norm_kind::rms;  ///< of each output head
  double norm_eps = 1e-5;
  bool norm_weight = true;  ///< it has a weight: [output width], shared by the heads
  double gain = 1;          ///< 1 - λ_init in version 1

  bool rotates = true;
  rope_style rope = rope_style::half;
  bool causal = true;
  index_t window = attention_mask::unlimited;  ///< keys that a query sees, its own included
  double scale = 0;                            ///< factor on q·k; 0 = 1/sqrt(head_width)
  key_source keys = key_source::own;

  norm_kind qk_norm = norm_kind::none;  ///< of every query and key head, before the rotation (timm, ArchScale)
  double qk_norm_eps = 1e-6;
  norm_kind scale_norm = norm_kind::none;  ///< over all heads of a token, before the output projection (timm)
  double scale_norm_eps = 1e-6;
  bool output_gate = false;  ///< sigmoid of a projection times each channel of the heads (Motif-3)
};

/// y = x Wᵀ + b. The weight is [outputs][inputs], contiguous, as PyTorch stores it; a fused matrix is a pointer into it. No
/// bias: null.
template <class T>
struct linear {
  const T* weight = nullptr;
  const T* bias = nullptr;
};

/// The numbers of one layer, T float or double. What the description does not have must stay null.
template <class T>
struct layer_weights {
  linear<T> q, k, v;  ///< [heads · width, model_width]; k and v stay empty if the keys are borrowed
  linear<T> out;      ///< [model_width, output heads · output width]
  const T *lambda_q1 = nullptr, *lambda_k1 = nullptr, *lambda_q2 = nullptr, *lambda_k2 = nullptr;  ///< vectors [head_width]
  const T *lambda_a = nullptr, *lambda_b = nullptr;                                                ///< scalars [1]
  linear<T> lambda_gate, alpha_gate;  ///< [output heads, model_width]
  const T* norm = nullptr;            ///< [output width]
  linear<T> q_norm, k_norm;           ///< [head_width]; a bias only for norm_kind::group (layer norm)
  linear<T> scale_norm;               ///< [output heads · output width]
  linear<T> output_gate;              ///< [output heads · output width, model_width]
};

DIFFATTN_NAMESPACE_END

DIFFATTN_ISA_NAMESPACE_BEGIN

/// λ of a layer whose rule makes it a number; 0 for gates and standard attention.
template <class T>
inline double lambda_of(const layer_config& c, const layer_weights<T>& w) noexcept {
  if (c.lambda == lambda_rule::vectors)
    return c.lambda_factor *
           lambda_from_vectors(w.lambda_q1, w.lambda_k1, w.lambda_q2, w.lambda_k2, c.head_width, c.lambda_init);
  if (c.lambda == lambda_rule::scalars)
    return c.lambda_factor *
           lambda_from_scalars(static_cast<double>(*w.lambda_a), static_cast<double>(*w.lambda_b), c.lambda_init);
  return 0;
}

/// All that a layer fixes of its attention call: head map, λ, norm, mask and scale. The caller adds q, k and v (or a cache),
/// out and, for rules with gates, `lambda` and `alpha` of the logits. Needs weights that `check` of the layer accepts.
template <class T>
inline forward_args<T> to_forward_args(const layer_config& c, const layer_weights<T>& w) noexcept {
  forward_args<T> args;
  args.heads = c.heads;
  if (c.lambda != lambda_rule::gate) args.lambda = static_cast<T>(lambda_of(c, w));
  args.norm.kind = c.norm, args.norm.eps = static_cast<T>(c.norm_eps), args.norm.gain = static_cast<T>(c.gain);
  args.norm.weight = w.norm;
  args.mask.causal = c.causal, args.mask.window = c.window;
  args.scale = static_cast<T>(c.scale);
  return args;
}

/// The part of a cache's description that the layer fixes; kind, storage, sequences and capacity are the caller's.
inline kv_cache_config to_cache_config(const layer_config& c) noexcept {
  kv_cache_config cache;
  cache.heads = c.heads, cache.key_width = c.head_width, cache.value_width = c.value_width;
  return cache;
}

DIFFATTN_ISA_NAMESPACE_END
