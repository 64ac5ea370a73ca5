// SPDX-License-Identifier: MIT
#pragma once

// What the metadata of a golden file say about its layer, and the library's description of the implementation that they name.
// The two must agree; every value that is not understood is thrown as an error that names the file, the key and the value.

#include <diffattn/models/llama.hpp>
#include <diffattn/models/motif.hpp>
#include <diffattn/models/phi4flash.hpp>
#include <diffattn/models/unilm.hpp>
#include <diffattn/models/vision.hpp>
#include <initializer_list>
#include <optional>
#include <utility>

#include "golden.hpp"

namespace test {

using diffattn::head_indices;
using diffattn::head_map;
using diffattn::index_t;
using diffattn::layer_config;

/// The meaning of a value, one of those known.
template <class Meaning>
Meaning meaning(const golden_file& f, const char* key, std::initializer_list<std::pair<const char*, Meaning>> known) {
  for (const auto& [text, value] : known)
    if (f.text(key) == text) return value;
  throw f.error(key, "is not understood");
}

/// The index lists: which physical heads belong to each output head.
inline std::vector<head_indices> listed_heads(const golden_file& f) {
  const auto n = static_cast<std::size_t>(f.integer("n_out_heads", 1));
  const auto read = [&](const char* key, const char* count, std::size_t most_places) {
    const std::vector<std::vector<index_t>> places = f.indices(key);
    if (places.size() > most_places || places[0].size() != n) throw f.error(key, "does not list n_out_heads heads");
    for (const std::vector<index_t>& list : places)
      for (const index_t head : list)
        if (head < 0 || head >= f.integer(count, 1)) throw f.error(key, std::string("names a head beyond ") + count);
    return places;
  };
  const auto q1 = read("q1_index", "n_q_heads", 1), q2 = read("q2_index", "n_q_heads", 1);
  const auto k1 = read("k1_index", "n_k_heads", 1), k2 = read("k2_index", "n_k_heads", 1);
  const auto v = read("v_index", "n_v_heads", 2);
  std::vector<head_indices> heads;
  for (std::size_t h = 0; h < n; ++h)
    heads.push_back({q1[0][h], q2[0][h], k1[0][h], k2[0][h], v[0][h], v.size() > 1 ? v[1][h] : -1});
  return heads;
}

/// The head map that the words mean; one that `check` refuses if the library has no name for them.
inline head_map named_heads(const golden_file& f) {
  using diffattn::value_layout;
  enum class pairing { stripe, halves, group };
  enum class grouping { pairwise, physical, shared, repeated, group };
  const auto queries = meaning<pairing>(
      f, "pairing", {{"stripe", pairing::stripe}, {"halves", pairing::halves}, {"group_stripe", pairing::group}});
  const auto keys = meaning<grouping>(f, "gqa_map",
                                      {{"pairwise", grouping::pairwise},
                                       {"per_physical_head", grouping::physical},
                                       {"shared_k", grouping::shared},
                                       {"repeat_then_halve", grouping::repeated},
                                       {"group", grouping::group}});
  const auto values = meaning<value_layout>(f, "v_layout",
                                            {{"native_wide", value_layout::wide},
                                             {"plain", value_layout::wide},
                                             {"concat_adjacent", value_layout::adjacent},
                                             {"concat_halves", value_layout::distant}});
  const index_t n = f.integer("n_out_heads", 1), key_heads = f.integer("n_k_heads", 1);
  head_map map;
  if (queries == pairing::halves && keys == grouping::repeated) map = head_map::halves(n, key_heads);
  if (queries == pairing::group && keys == grouping::group)
    map = head_map::grouped(n, f.integer("signal_per_noise", 1), key_heads / 2, values);
  if (queries == pairing::stripe && keys == grouping::physical) map = head_map::interleaved_repeated(n, key_heads / 2);
  if (queries == pairing::stripe && keys == grouping::shared) map = head_map::shared(n, key_heads);
  if (queries == pairing::stripe && keys == grouping::pairwise) map = head_map::interleaved(n, key_heads / 2, values);
  return map;
}

/// λ_init as stored, which must be what its rule makes of the layer.
inline double lambda_init_of(const golden_file& f) {
  using diffattn::layer_index;
  const auto rule = meaning<std::optional<layer_index>>(f, "lambda_init_rule",
                                                        {{"zero_based", layer_index::zero_based},
                                                         {"absolute_zero_based", layer_index::zero_based},
                                                         {"zero_based_minus_one", layer_index::zero_based_minus_one},
                                                         {"none", std::nullopt}});
  const double stored = f.number("lambda_init");
  if (rule && !(std::fabs(stored - diffattn::lambda_init(f.integer("layer_index", 0), *rule)) <= 1e-14))
    throw f.error("lambda_init", "is not what lambda_init_rule and layer_index make");
  return stored;
}

/// What the metadata say. `heads` are the listed ones, which the result may point to.
inline layer_config described_layer(const golden_file& f, const std::vector<head_indices>& heads) {
  using diffattn::lambda_rule;
  using diffattn::norm_kind;
  using diffattn::rope_style;
  layer_config c;
  const head_map named = named_heads(f), listed = head_map::table(heads.data(), static_cast<index_t>(heads.size()));
  diffattn::checks::head_counts counts;
  const bool fits = diffattn::checks::heads(named, counts) == diffattn::status::ok &&
                    counts.queries == f.integer("n_q_heads", 1) && counts.keys == f.integer("n_k_heads", 1) &&
                    counts.values == f.integer("n_v_heads", 1);
  c.heads = fits && same_heads(named, listed) ? named : listed;
  c.head_width = f.integer("head_dim", 1), c.value_width = f.integer("v_head_dim", 1);
  if (f.integer("out_head_dim", 1) != c.value_width * (heads[0].value_2 < 0 ? 1 : 2))
    throw f.error("out_head_dim", "is not the width of the values that v_index lists");

  c.lambda = meaning<lambda_rule>(f, "lambda_kind",
                                  {{"exp_exp", lambda_rule::vectors},
                                   {"exp_exp_scalars", lambda_rule::scalars},
                                   {"sigmoid_token_head", lambda_rule::gate}});
  c.lambda_init = lambda_init_of(f);
  c.norm = meaning<norm_kind>(f, "norm", {{"rms", norm_kind::rms}, {"none", norm_kind::none}});
  if (c.norm != norm_kind::none) c.norm_eps = f.number("eps");
  if (c.norm_eps < 0) throw f.error("eps", "is negative");
  c.norm_weight = meaning<bool>(f, "affine", {{"true", true}, {"false", false}});
  c.gain = f.number("out_scale");

  const auto style = meaning<std::optional<rope_style>>(
      f, "rope_style", {{"interleaved", rope_style::interleaved}, {"half", rope_style::half}, {"none", std::nullopt}});
  c.rotates = style.has_value();
  if (style) c.rope = *style;
  c.causal = meaning<bool>(f, "causal", {{"true", true}, {"false", false}});
  c.window = f.integer("window", diffattn::attention_mask::unlimited);
  if (c.window == 0 || (c.window > 0 && !c.causal)) throw f.error("window", "is 0, or that of a layer that is not causal");
  c.scale = f.number("scale");
  if (c.scale == 0 || !std::isfinite(static_cast<float>(c.scale) * 1.5f)) throw f.error("scale", "is not a usable factor");

  if (f.has("layer.x")) {
    if (f["layer.x"].shape.size() != 3) throw llm::load_error(f.path(), "tensor \"layer.x\": has not three axes");
    c.model_width = f["layer.x"].shape[2];
    if (f.has("layer.k_in") == f.has("layer.wk"))
      throw llm::load_error(f.path(), "one of the tensors \"layer.wk\" and \"layer.k_in\" must be there");
    if (f.has("layer.k_in")) c.keys = diffattn::key_source::borrowed;
    // Those that timm's layers are built with; a file says so by their weights.
    if (f.has("layer.q_norm_weight") || f.has("layer.k_norm_weight")) c.qk_norm = norm_kind::rms;
    if (f.has("layer.scale_norm_weight")) c.scale_norm = norm_kind::rms;
  }
  return c;
}

/// The library's description of a layer of that implementation; none if it is not one of those it knows.
inline std::optional<layer_config> family_layer(const golden_file& f, const layer_config& said) {
  namespace models = diffattn::models;
  const diffattn::layer_shape s{said.model_width, f.integer("n_q_heads", 1), f.integer("n_k_heads", 1), said.head_width};
  const index_t layer = f.says("layer_index") ? f.integer("layer_index", 0) : 0;
  const std::string implementation = f.text("implementation");
  const auto is = [&](const char* prefix) { return implementation.rfind(prefix, 0) == 0; };
  if (is("unilm V1 MultiheadFlashDiff1") || is("unilm V1 MultiheadFlashDiff2")) return models::unilm_v1(s, layer);
  if (is("unilm V1 MultiheadDiffAttn")) return models::unilm_v1_naive(s, layer);
  if (is("unilm V2")) return models::unilm_v2(s);
  if (is("HF DiffLlama") || is("hf_diffllama")) return models::diffllama(s, layer, said.norm_eps);
  if (is("Phi-4-mini-flash"))
    return said.keys == diffattn::key_source::own ? models::phi4flash(s, layer, said.window)
                                                  : models::phi4flash_cross(s, layer);
  if (is("Motif")) {
    const index_t noise_heads = s.query_heads - said.heads.heads;
    return 2 * noise_heads == s.query_heads ? models::motif_2p6b(s, layer) : models::motif_2(s, layer, noise_heads);
  }
  if (is("timm")) {
    using diffattn::lambda_rule;
    layer_config c = models::timm(s, layer, said.lambda == lambda_rule::scalars ? lambda_rule::scalars : lambda_rule::vectors);
    c.qk_norm = said.qk_norm, c.scale_norm = said.scale_norm;
    return c;
  }
  return std::nullopt;
}

/// Throws unless the family's description says what the metadata say.
inline void expect_agreement(const golden_file& f, const layer_config& family, const layer_config& said) {
  const auto differs = [&](const char* key) {
    return f.error(key, "is not what the library knows of " + llm::in_quotes(f.text("implementation")));
  };
  diffattn::checks::head_counts counts;
  if (diffattn::checks::heads(family.heads, counts) != diffattn::status::ok) throw differs("n_k_heads");
  const auto near = [](double a, double b) { return std::fabs(a - b) <= 1e-14; };
  const double scale = family.scale != 0 ? family.scale : 1 / std::sqrt(static_cast<double>(family.head_width));
  const struct {
    const char* key;
    bool agrees;
  } all[] = {{"n_out_heads", family.heads.heads == said.heads.heads},
             {"n_q_heads", counts.queries == f.integer("n_q_heads", 1)},
             {"n_k_heads", counts.keys == f.integer("n_k_heads", 1)},
             {"n_v_heads", counts.values == f.integer("n_v_heads", 1)},
             {"head_dim", family.head_width == said.head_width},
             {"v_head_dim", family.value_width == said.value_width},
             {"lambda_kind", family.lambda == said.lambda},
             {"lambda_init", near(family.lambda_init, said.lambda_init)},
             {"norm", family.norm == said.norm},
             {"eps", family.norm_eps == said.norm_eps},
             {"affine", family.norm_weight == said.norm_weight},
             {"out_scale", near(family.gain, said.gain)},
             {"rope_style", family.rotates == said.rotates && (!said.rotates || family.rope == said.rope)},
             {"causal", family.causal == said.causal},
             {"window", family.window == said.window},
             {"scale", near(scale, said.scale)},
             {"layer.wk", family.keys == said.keys}};
  for (const auto& x : all)
    if (!x.agrees) throw differs(x.key);
  const std::pair<const char*, index_t head_indices::*> lists[] = {
      {"q1_index", &head_indices::query_1}, {"q2_index", &head_indices::query_2}, {"k1_index", &head_indices::key_1},
      {"k2_index", &head_indices::key_2},   {"v_index", &head_indices::value_1},  {"v_index", &head_indices::value_2}};
  for (const auto& [key, place] : lists)
    for (index_t h = 0; h < said.heads.heads; ++h)
      if (family.heads[h].*place != said.heads[h].*place) throw differs(key);
  // The lists are right, so the words are not.
  if (said.heads.queries == head_map::pairing::table) throw differs("pairing");
}

/// The layer of a file: by its family if that is known, else by its metadata.
inline layer_config layer_of(const golden_file& f, const std::vector<head_indices>& heads) {
  const layer_config said = described_layer(f, heads);
  std::optional<layer_config> family = family_layer(f, said);
  if (!family) return said;
  expect_agreement(f, *family, said);
  family->scale = said.scale;
  return *family;
}

}  // namespace test
