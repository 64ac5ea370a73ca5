// SPDX-License-Identifier: MIT
#pragma once

// What a layer is told for one call, and whether that is meaningful. Shapes, addresses and lengths: no weight is read.

#include "../kv_cache.hpp"
#include "layer_config.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN

/// One call of one layer. T is float or double.
template <class T>
struct layer_args {
  layer_config config;
  layer_weights<T> weights;

  tensor_view<const T>
      x;               ///< [batch, tokens, 1, model_width]; all tokens at one distance: batch_stride = tokens · token_stride
  tensor_view<T> out;  ///< the same shape; may not overlap anything else

  rope_view rope;                      ///< if the layer rotates: a table that holds all positions, in the layer's style
  const index_t* positions = nullptr;  ///< [batch] position of the first token of each entry; null: the tokens that its
                                       ///< sequence holds already. With padding on the left: minus the number of padding tokens
  const key_range* key_ranges = nullptr;  ///< [batch] keys that are no padding; null: all

  kv_cache* cache = nullptr;  ///< takes the new keys and values, then is read. Null: the tokens of this call are all
  kv_view keys_and_values;    ///< key_source::borrowed: what is read instead; view_of_tensors, or another layer's cache
  const index_t* sequences = nullptr;  ///< [batch] sequence of either for each entry; null: entry b is sequence b
};

namespace layers {

/// Counts that follow from a description. Channels are those of one token in all heads; 0 for what a layer does not have.
struct sizes {
  checks::head_counts heads;

  DIFFATTN_INLINE index_t out_width(const layer_config& c) const noexcept {
    return heads.two_values ? 2 * c.value_width : c.value_width;
  }
  DIFFATTN_INLINE index_t query_channels(const layer_config& c) const noexcept { return heads.queries * c.head_width; }
  DIFFATTN_INLINE index_t key_channels(const layer_config& c) const noexcept {
    return c.keys == key_source::own ? heads.keys * c.head_width : 0;
  }
  DIFFATTN_INLINE index_t value_channels(const layer_config& c) const noexcept {
    return c.keys == key_source::own ? heads.values * c.value_width : 0;
  }
  DIFFATTN_INLINE index_t out_channels(const layer_config& c) const noexcept { return c.heads.heads * out_width(c); }
  DIFFATTN_INLINE index_t lambda_channels(const layer_config& c) const noexcept {
    return c.lambda == lambda_rule::gate ? c.heads.heads : 0;
  }
  DIFFATTN_INLINE index_t alpha_channels(const layer_config& c) const noexcept { return c.alpha_gate ? c.heads.heads : 0; }
  DIFFATTN_INLINE index_t gate_channels(const layer_config& c) const noexcept { return c.output_gate ? out_channels(c) : 0; }
};

/// The sequence of batch entry b, and the tokens that it holds before the call.
template <class T>
DIFFATTN_INLINE index_t sequence(const layer_args<T>& a, index_t b) noexcept {
  return a.sequences ? a.sequences[b] : b;
}
template <class T>
DIFFATTN_INLINE index_t length_before(const layer_args<T>& a, index_t b) noexcept {
  if (a.cache) return a.cache->length(sequence(a, b));
  return a.config.keys == key_source::borrowed ? a.keys_and_values.length(sequence(a, b)) - a.x.tokens : 0;
}
/// The position of the first token of batch entry b.
template <class T>
DIFFATTN_INLINE index_t first_position(const layer_args<T>& a, index_t b) noexcept {
  return a.positions ? a.positions[b] : length_before(a, b);
}
/// The longest sequence after the call.
template <class T>
DIFFATTN_INLINE index_t longest(const layer_args<T>& a) noexcept {
  index_t most = 0;
  for (index_t b = 0; b < a.x.batch; ++b) {
    const index_t n = length_before(a, b) + a.x.tokens;
    if (n > most) most = n;
  }
  return most;
}

/// The description by itself.
DIFFATTN_INLINE status config(const layer_config& c, sizes& n) noexcept {
  constexpr index_t most = checks::max_heads;  // channels of one head or token
  if (const status s = checks::heads(c.heads, n.heads); s != status::ok) return s;
  if (c.model_width <= 0 || c.head_width <= 0 || c.value_width <= 0 || c.model_width > most || c.head_width > most ||
      c.value_width > most)
    return status::layer_width;
  const auto known = [](norm_kind k) { return k == norm_kind::rms || k == norm_kind::group || k == norm_kind::none; };
  const bool one_map = c.lambda == lambda_rule::none;
  const bool single = c.heads.queries == head_map::pairing::single;
  if (c.lambda < lambda_rule::vectors || c.lambda > lambda_rule::none ||
      (c.keys != key_source::own && c.keys != key_source::borrowed) || !known(c.norm) || !known(c.qk_norm) ||
      !known(c.scale_norm))
    return status::layer_option;
  if (one_map != single || (one_map && (c.alpha_gate || c.norm != norm_kind::none))) return status::layer_one_map;
  for (const double eps : {c.norm_eps, c.qk_norm_eps, c.scale_norm_eps})
    if (!std::isfinite(static_cast<float>(eps)) || eps < 0) return status::norm_eps;
  if (!std::isfinite(static_cast<float>(c.gain))) return status::norm_gain;
  if (!std::isfinite(static_cast<float>(c.scale) * 1.5f)) return status::scale_not_finite;
  if (c.window != attention_mask::unlimited) {
    if (c.window <= 0) return status::mask_window;
    if (!c.causal) return status::mask_window_not_causal;
  }
  return status::ok;
}

/// Are exactly those numbers given that the description asks for?
template <class T>
DIFFATTN_INLINE status weights(const layer_config& c, const layer_weights<T>& w) noexcept {
  const bool own = c.keys == key_source::own, vectors = c.lambda == lambda_rule::vectors;
  const bool scalars = c.lambda == lambda_rule::scalars, gate = c.lambda == lambda_rule::gate;
  const bool qk = c.qk_norm != norm_kind::none;
  struct {
    const T* data;
    bool wanted;
  } const all[] = {{w.q.weight, true},
                   {w.k.weight, own},
                   {w.v.weight, own},
                   {w.out.weight, true},
                   {w.lambda_q1, vectors},
                   {w.lambda_k1, vectors},
                   {w.lambda_q2, vectors},
                   {w.lambda_k2, vectors},
                   {w.lambda_a, scalars},
                   {w.lambda_b, scalars},
                   {w.lambda_gate.weight, gate},
                   {w.alpha_gate.weight, c.alpha_gate},
                   {w.norm, c.norm_weight},
                   {w.output_gate.weight, c.output_gate}};
  for (const auto& x : all)
    if (x.wanted != (x.data != nullptr)) return x.wanted ? status::layer_weight_missing : status::layer_weight_unexpected;
  const auto stray_bias = [](const linear<T>& l) { return !l.weight && l.bias; };
  const auto norm_bias = [](const linear<T>& l, norm_kind k) { return l.bias && k != norm_kind::group; };
  const bool stray = stray_bias(w.k) || stray_bias(w.v) || stray_bias(w.lambda_gate) || stray_bias(w.alpha_gate) ||
                     stray_bias(w.output_gate) || (!qk && w.q_norm.weight) || ((!qk || !own) && w.k_norm.weight) ||
                     (!own && w.k_norm.bias) || (c.scale_norm == norm_kind::none && w.scale_norm.weight);
  if (stray) return status::layer_weight_unexpected;
  return norm_bias(w.q_norm, c.qk_norm) || norm_bias(w.k_norm, c.qk_norm) || norm_bias(w.scale_norm, c.scale_norm)
             ? status::norm_bias
             : status::ok;
}

/// x or out: one row of model_width channels for each token, evenly spaced.
template <class T>
DIFFATTN_INLINE bool is_rows(const tensor_view<T>& t, index_t width) noexcept {
  if (checks::tensor(t, status::q_null, status::q_size, status::q_width_stride) != status::ok) return false;
  const bool even = t.batch <= 1 || t.tokens <= 1 || t.batch_stride == t.tokens * t.token_stride;
  const index_t stride = t.tokens > 1 ? t.token_stride : t.batch_stride;
  return t.heads == 1 && t.width == width && even && (t.batch * t.tokens <= 1 || stride >= width);
}

/// The attention call as far as keys and mask go.
template <class T>
DIFFATTN_INLINE forward_args<T> call_on_keys(const layer_args<T>& a) noexcept {
  forward_args<T> call;
  call.q = view<const T>(nullptr, a.x.batch, a.x.tokens, 1, 1);
  call.heads = a.config.heads;
  call.cache = a.cache ? a.cache->view() : a.keys_and_values, call.sequences = a.sequences;
  call.mask.causal = a.config.causal, call.mask.window = a.config.window, call.mask.key_ranges = a.key_ranges;
  return call;
}

/// Keys: the cache or the borrowed ones must be those of this layer.
template <class T>
DIFFATTN_INLINE status keys(const layer_args<T>& a, const sizes& n) noexcept {
  const layer_config& c = a.config;
  const bool borrowed = c.keys == key_source::borrowed, cached = a.cache != nullptr;
  if (borrowed != a.keys_and_values.is_given() || (borrowed && cached)) return status::layer_keys;
  if (!borrowed && !cached) return a.sequences ? status::cache_missing : status::ok;
  if (cached && !a.cache->is_open()) return status::cache_not_open;
  const forward_args<T> call = call_on_keys(a);
  const kv_rows &k = call.cache.keys, &v = call.cache.values;
  if (k.heads != n.heads.keys || k.width != c.head_width) return status::cache_key_shape;
  if (v.heads != n.heads.values || v.width != c.value_width) return status::cache_value_shape;
  if (const status s = checks::cache(call); s != status::ok) return s;
  return checks::cache_matches(call) ? status::ok : status::cache_heads;
}

/// Will the keys that the queries see be there once the new ones are appended? (The attention call would find out, too late.)
template <class T>
DIFFATTN_INLINE status ranges(const layer_args<T>& a) noexcept {
  const forward_args<T> call = call_on_keys(a);
  const kv_view& kv = call.cache;
  for (index_t b = 0; b < a.x.batch; ++b) {
    const index_t end = length_before(a, b) + a.x.tokens;
    if (a.key_ranges) {
      const key_range r = a.key_ranges[b];
      if (r.begin < 0 || r.end < r.begin || r.end > end) return status::mask_key_range;
    }
    if (!a.cache || a.x.tokens == 0) continue;
    const key_range seen = schedule::keys_of_rows(call.mask, a.x.tokens, end, b, 0, a.x.tokens - 1);
    const bool overwritten = a.cache->config().kind == kv_cache_kind::ring && end - seen.begin > kv.page_tokens;
    if (seen.begin < seen.end && (seen.begin < kv.begin(sequence(a, b)) || overwritten)) return status::cache_range;
  }
  return a.config.keys == key_source::borrowed ? checks::cache_pages(call) : status::ok;
}

/// Every weight.
template <class T>
struct weight_ranges {
  checks::byte_range ranges[27];
};

template <class T>
DIFFATTN_INLINE weight_ranges<T> ranges_of(const layer_config& c, const layer_weights<T>& w, const sizes& n) noexcept {
  const auto of = [](const T* data, index_t count) {
    const checks::axis axes[1] = {{count, 1}};
    return data ? checks::bytes_of(data, axes, 1) : checks::byte_range{};
  };
  const index_t x = c.model_width, q = n.query_channels(c), k = n.key_channels(c), v = n.value_channels(c), d = c.head_width;
  const index_t heads = n.out_channels(c), m = c.heads.heads;
  return {{of(w.q.weight, q * x),
           of(w.q.bias, q),
           of(w.k.weight, k * x),
           of(w.k.bias, k),
           of(w.v.weight, v * x),
           of(w.v.bias, v),
           of(w.out.weight, heads * x),
           of(w.out.bias, x),
           of(w.lambda_q1, d),
           of(w.lambda_k1, d),
           of(w.lambda_q2, d),
           of(w.lambda_k2, d),
           of(w.lambda_a, 1),
           of(w.lambda_b, 1),
           of(w.lambda_gate.weight, m * x),
           of(w.lambda_gate.bias, m),
           of(w.alpha_gate.weight, m * x),
           of(w.alpha_gate.bias, m),
           of(w.norm, n.out_width(c)),
           of(w.q_norm.weight, d),
           of(w.q_norm.bias, d),
           of(w.k_norm.weight, d),
           of(w.k_norm.bias, d),
           of(w.scale_norm.weight, heads),
           of(w.scale_norm.bias, heads),
           of(w.output_gate.weight, heads * x),
           of(w.output_gate.bias, heads)}};
}

/// Does memory that a call writes to meet what it reads later, or what must stay?
template <class T>
DIFFATTN_INLINE bool meets_inputs(checks::byte_range r, const layer_args<T>& a, const sizes& n) noexcept {
  const checks::axis table[2] = {{a.rope.positions, a.rope.width / 2}, {a.rope.width / 2, 1}}, entries[1] = {{a.x.batch, 1}};
  bool hit = checks::intersect(r, checks::bytes_of(a.x)) || checks::intersects_input(r, call_on_keys(a));
  for (const checks::byte_range& w : ranges_of(a.config, a.weights, n).ranges) hit |= checks::intersect(r, w);
  for (const float* t : {a.rope.cos, a.rope.sin}) hit |= t && checks::intersect(r, checks::bytes_of(t, table, 2));
  return hit || (a.positions && checks::intersect(r, checks::bytes_of(a.positions, entries, 1)));
}

/// The workspace: large enough, and apart from every tensor.
template <class T>
DIFFATTN_INLINE status memory(const layer_args<T>& a, const sizes& n, workspace w, std::size_t needed) noexcept {
  if (needed > checks::max_bytes) return status::workspace_overflow;
  if (!w.data) return status::workspace_null;
  if (w.bytes < needed) return status::workspace_too_small;
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(w.data);
  const checks::byte_range mine{at, at + w.bytes};
  return meets_inputs(mine, a, n) || checks::intersect(mine, checks::bytes_of(a.out)) ? status::workspace_overlap : status::ok;
}

template <class T>
DIFFATTN_INLINE status check(const layer_args<T>& a, sizes& n) noexcept {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>, "diffattn layers compute in float or double");
  status s = config(a.config, n);
  if (s == status::ok) s = weights(a.config, a.weights);
  if (s != status::ok) return s;
  if (!is_rows(a.x, a.config.model_width)) return status::layer_x;
  if (!is_rows(a.out, a.config.model_width) || a.out.batch != a.x.batch || a.out.tokens != a.x.tokens) return status::layer_out;
  const index_t widest = n.query_channels(a.config) + n.out_channels(a.config) + n.key_channels(a.config);
  if (checks::capped_product(checks::capped_product(a.x.batch, a.x.tokens), widest) >= checks::limit / 64)
    return status::q_size;
  if ((s = keys(a, n)) != status::ok) return s;
  if (a.config.rotates != a.rope.is_given()) return status::layer_rope;
  if (a.config.rotates) {
    if (a.rope.style != a.config.rope) return status::layer_rope;
    if ((s = diffattn::check(a.rope, a.config.head_width)) != status::ok) return s;
    for (index_t b = 0; b < a.x.batch; ++b)
      if (!a.rope.holds(first_position(a, b), a.x.tokens)) return status::rope_position;
  }
  if ((s = ranges(a)) != status::ok) return s;
  return meets_inputs(checks::bytes_of(a.out), a, n) ? status::layer_out : status::ok;
}

}  // namespace layers

/// The first thing wrong with a call, or ok.
template <class T>
inline status check(const layer_args<T>& args) noexcept {
  layers::sizes n;
  return layers::check(args, n);
}

DIFFATTN_ISA_NAMESPACE_END
