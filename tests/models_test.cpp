// SPDX-License-Identifier: MIT
// The descriptions of the families against tables written by hand from the published code, and what of a configuration is
// refused.

#include <gtest/gtest.h>

#include <diffattn/models/axolotl.hpp>
#include <diffattn/models/layer_check.hpp>
#include <diffattn/models/llama.hpp>
#include <diffattn/models/motif.hpp>
#include <diffattn/models/phi4flash.hpp>
#include <diffattn/models/unilm.hpp>
#include <diffattn/models/vision.hpp>
#include <vector>

namespace {

using namespace diffattn::models;
using diffattn::attention_mask;
using diffattn::index_t;
using diffattn::key_source;
using diffattn::lambda_rule;
using diffattn::layer_config;
using diffattn::layer_shape;
using diffattn::norm_kind;
using diffattn::rope_style;
using diffattn::status;
using list = std::vector<index_t>;

constexpr index_t unlimited = attention_mask::unlimited;
constexpr auto half = rope_style::half, interleaved = rope_style::interleaved;

/// What `check` says of a description by itself: no weights are given, so a good one lacks its first.
status refused(const layer_config& c) {
  diffattn::layer_args<float> args;
  args.config = c;
  return diffattn::check(args);
}
constexpr status good = status::layer_weight_missing;

/// The head map, one entry for each output head.
void expect_heads(const layer_config& c, const list& q1, const list& q2, const list& k1, const list& k2, const list& v1,
                  const list& v2 = {}) {
  ASSERT_EQ(c.heads.heads, static_cast<index_t>(q1.size()));
  ASSERT_EQ(refused(c), good);
  list actual[6];
  for (index_t h = 0; h < c.heads.heads; ++h) {
    const diffattn::head_indices i = c.heads[h];
    const index_t read[] = {i.query_1, i.query_2, i.key_1, i.key_2, i.value_1, i.value_2};
    for (int n = 0; n < 6; ++n) actual[n].push_back(read[n]);
  }
  EXPECT_EQ(actual[0], q1);
  EXPECT_EQ(actual[1], q2);
  EXPECT_EQ(actual[2], k1);
  EXPECT_EQ(actual[3], k2);
  EXPECT_EQ(actual[4], v1);
  EXPECT_EQ(actual[5], v2.empty() ? list(q1.size(), -1) : v2);
}

/// All that is not a head. A family's constants in the order of the fields.
struct constants {
  index_t model_width, head_width, value_width;
  lambda_rule lambda;
  double lambda_init, gain;
  norm_kind norm;
  double norm_eps;  ///< 0: there is no norm
  bool norm_weight, rotates;
  rope_style rope;  ///< if it rotates
  bool causal = true;
  index_t window = unlimited;
  key_source keys = key_source::own;
};

void expect_constants(const layer_config& c, const constants& e) {
  EXPECT_EQ(c.model_width, e.model_width);
  EXPECT_EQ(c.head_width, e.head_width);
  EXPECT_EQ(c.value_width, e.value_width);
  EXPECT_EQ(c.lambda, e.lambda);
  EXPECT_NEAR(c.lambda_init, e.lambda_init, 5e-7);
  EXPECT_NEAR(c.gain, e.gain, 5e-7);
  EXPECT_EQ(c.norm, e.norm);
  if (e.norm != norm_kind::none) {
    EXPECT_EQ(c.norm_eps, e.norm_eps);
  }
  EXPECT_EQ(c.norm_weight, e.norm_weight);
  EXPECT_EQ(c.rotates, e.rotates);
  if (e.rotates) {
    EXPECT_EQ(c.rope, e.rope);
  }
  EXPECT_EQ(c.causal, e.causal);
  EXPECT_EQ(c.window, e.window);
  EXPECT_EQ(c.keys, e.keys);
  EXPECT_EQ(c.scale, 0);
  EXPECT_FALSE(c.alpha_gate);
  EXPECT_EQ(c.qk_norm, norm_kind::none);
  EXPECT_EQ(c.scale_norm, norm_kind::none);
}

/// Channels that the projections of q, k and v make and the output projection takes.
void expect_channels(const layer_config& c, const list& expected) {
  diffattn::layers::sizes n;
  ASSERT_EQ(diffattn::layers::config(c, n), status::ok);
  EXPECT_EQ((list{n.query_channels(c), n.key_channels(c), n.value_channels(c), n.out_channels(c)}), expected);
}

// exp(-0.3 l) of the first layers, by hand.
constexpr double first = 0.2, second = 0.355509, third = 0.470713, motif_first = -0.009915;

TEST(Models, UnilmV1) {
  const layer_config c = unilm_v1({64, 8, 4, 8}, 0);
  expect_heads(c, {0, 2, 4, 6}, {1, 3, 5, 7}, {0, 0, 2, 2}, {1, 1, 3, 3}, {0, 0, 1, 1});
  expect_constants(c, {64, 8, 16, lambda_rule::vectors, first, 0.8, norm_kind::rms, 1e-5, true, true, interleaved});
  EXPECT_NEAR(unilm_v1({64, 8, 4, 8}, 1).lambda_init, second, 5e-7);
  EXPECT_NEAR(unilm_v1({64, 8, 4, 8}, 2).lambda_init, third, 5e-7);
  EXPECT_NEAR(unilm_v1({64, 8, 4, 8}, 2).gain, 1 - third, 5e-7);
  expect_channels(c, {64, 32, 32, 64});
  EXPECT_EQ(c.lambda_factor, 1);
  EXPECT_FALSE(c.output_gate);
}

TEST(Models, UnilmV1Naive) {
  const layer_config c = unilm_v1_naive({64, 8, 4, 8}, 1);
  expect_heads(c, {0, 2, 4, 6}, {1, 3, 5, 7}, {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 0, 1, 1});
  expect_constants(c, {64, 8, 16, lambda_rule::vectors, second, 1 - second, norm_kind::rms, 1e-5, true, true, interleaved});
  // Without grouped keys the two files agree.
  expect_heads(unilm_v1_naive({64, 4, 4, 16}, 0), {0, 2}, {1, 3}, {0, 2}, {1, 3}, {0, 1});
}

TEST(Models, UnilmV2) {
  const layer_config c = unilm_v2({64, 8, 2, 8});
  expect_heads(c, {0, 2, 4, 6}, {1, 3, 5, 7}, {0, 0, 1, 1}, {0, 0, 1, 1}, {0, 0, 1, 1});
  expect_constants(c, {64, 8, 8, lambda_rule::gate, 0, 1, norm_kind::none, 0, false, true, interleaved});
  expect_channels(c, {64, 16, 16, 32});
}

TEST(Models, Llama) {
  const layer_config c = llama({64, 8, 2, 8});
  const list keys = {0, 0, 0, 0, 1, 1, 1, 1};
  expect_heads(c, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7}, keys, keys, keys);
  expect_constants(c, {64, 8, 8, lambda_rule::none, 0, 1, norm_kind::none, 0, false, true, half});
}

TEST(Models, DiffLlama) {
  const layer_config c = diffllama({64, 8, 4, 8}, 0, 1e-6);
  expect_heads(c, {0, 1, 2, 3}, {4, 5, 6, 7}, {0, 0, 1, 1}, {2, 2, 3, 3}, {0, 0, 1, 1}, {2, 2, 3, 3});
  expect_constants(c, {64, 8, 8, lambda_rule::vectors, first, 0.8, norm_kind::rms, 1e-6, false, true, half});
  // kajuma/DiffLlama-0.3B-handcut: 32 heads of 64 on 8.
  const layer_config real = diffllama({2048, 32, 8, 64}, 2);
  expect_constants(real, {2048, 64, 64, lambda_rule::vectors, third, 1 - third, norm_kind::rms, 1e-5, false, true, half});
  expect_channels(real, {2048, 512, 512, 2048});
  // Eager code defines an odd number of key heads, and one.
  expect_heads(diffllama({64, 6, 3, 8}, 0), {0, 1, 2}, {3, 4, 5}, {0, 0, 1}, {1, 2, 2}, {0, 0, 1}, {1, 2, 2});
  expect_heads(diffllama({64, 4, 1, 8}, 0), {0, 1}, {2, 3}, {0, 0}, {0, 0}, {0, 0}, {0, 0});
}

TEST(Models, Phi4Flash) {
  const layer_config c = phi4flash({64, 8, 4, 8}, 1, 512);
  const list k1 = {0, 0, 2, 2}, k2 = {1, 1, 3, 3};
  expect_heads(c, {0, 2, 4, 6}, {1, 3, 5, 7}, k1, k2, k1, k2);
  constants e = {64, 8, 8, lambda_rule::vectors, second, 1 - second, norm_kind::rms, 1e-5, true, false, half, true, 512};
  expect_constants(c, e);
  const layer_config cross = phi4flash_cross({64, 8, 4, 8}, 1);
  expect_heads(cross, {0, 2, 4, 6}, {1, 3, 5, 7}, k1, k2, k1, k2);
  e.window = unlimited, e.keys = key_source::borrowed;
  expect_constants(cross, e);
  // The published model: 40 query and 20 key heads of 64; layers 1, 3, 5, the one that lends its keys, and those that read
  // them.
  const layer_shape real{2560, 40, 20, 64};
  EXPECT_NEAR(phi4flash(real, 1, 512).lambda_init, 0.355509, 5e-7);
  EXPECT_NEAR(phi4flash(real, 3, 512).lambda_init, 0.556058, 5e-7);
  EXPECT_NEAR(phi4flash(real, 5, 512).lambda_init, 0.666122, 5e-7);
  expect_channels(phi4flash(real, 17, unlimited), {2560, 1280, 1280, 2560});
  expect_channels(phi4flash_cross(real, 19), {2560, 0, 0, 2560});
  EXPECT_EQ(phi4flash(real, 1, 512).heads[19].key_1, 18);
}

TEST(Models, Motif2) {
  const layer_config c = motif_2({64, 10, 4, 8}, 0, 2);
  expect_heads(c, {0, 1, 2, 3, 5, 6, 7, 8}, {4, 4, 4, 4, 9, 9, 9, 9}, {0, 0, 0, 0, 2, 2, 2, 2}, {1, 1, 1, 1, 3, 3, 3, 3},
               {0, 0, 0, 0, 2, 2, 2, 2}, {1, 1, 1, 1, 3, 3, 3, 3});
  expect_constants(c, {64, 8, 8, lambda_rule::vectors, motif_first, 1.009915, norm_kind::rms, 1e-5, true, true, half});
  EXPECT_NEAR(motif_2({64, 10, 4, 8}, 1, 2).lambda_init, first, 5e-7);
  EXPECT_NEAR(motif_2({64, 10, 4, 8}, 2, 2).lambda_init, second, 5e-7);
  // Motif-2-12.7B: 40 heads of 128, 8 of them noise, on 16; its output projection takes 32 heads of 256.
  const layer_config real = motif_2({4096, 40, 16, 128}, 39, 8);
  expect_channels(real, {5120, 2048, 2048, 8192});
  EXPECT_NEAR(real.lambda_init, 0.799993, 5e-7);
  const diffattn::head_indices last = real.heads[31];
  EXPECT_EQ((list{last.query_1, last.query_2, last.key_1, last.key_2, last.value_1, last.value_2}),
            (list{38, 39, 14, 15, 14, 15}));
  EXPECT_EQ(real.heads.heads, 32);
}

TEST(Models, Motif2p6B) {
  const layer_config c = motif_2p6b({64, 8, 4, 8}, 0);
  const list k1 = {0, 0, 2, 2}, k2 = {1, 1, 3, 3};
  expect_heads(c, {0, 2, 4, 6}, {1, 3, 5, 7}, k1, k2, k1, k2);
  expect_constants(c, {64, 8, 8, lambda_rule::vectors, motif_first, 1.009915, norm_kind::rms, 1e-5, true, true, half});
  expect_channels(motif_2p6b({2048, 16, 16, 128}, 0), {2048, 2048, 2048, 2048});
}

TEST(Models, Motif3) {
  const list kv = {0, 0, 0, 0, 1, 1, 1, 1};
  for (const bool gate : {false, true}) {
    const layer_config c = motif_3({64, 10, 2, 8}, 2, gate);
    expect_heads(c, {0, 1, 2, 3, 5, 6, 7, 8}, {4, 4, 4, 4, 9, 9, 9, 9}, kv, kv, kv);
    expect_constants(c, {64, 8, 8, lambda_rule::gate, 0, 1, norm_kind::none, 0, false, true, half});
    EXPECT_EQ(c.output_gate, gate);
  }
  expect_heads(motif_3({64, 3, 1, 8}, 1, true), {0, 1}, {2, 2}, {0, 0}, {0, 0}, {0, 0});  // an odd number of key heads
  const layer_config real = motif_3({4096, 80, 16, 192}, 16, true);
  EXPECT_EQ(refused(real), good);
  EXPECT_EQ(real.heads.heads, 64);
}

TEST(Models, Timm) {
  for (const lambda_rule rule : {lambda_rule::vectors, lambda_rule::scalars}) {
    const layer_config c = timm({64, 4, 4, 16}, 1, rule);
    expect_heads(c, {0, 2}, {1, 3}, {0, 2}, {1, 3}, {0, 1});
    expect_constants(c, {64, 16, 32, rule, second, 1 - second, norm_kind::rms, 1e-5, true, false, half, false});
  }
  EXPECT_EQ(timm({64, 4, 4, 16}, 0).lambda, lambda_rule::vectors);
  EXPECT_NEAR(timm({64, 4, 4, 16}, 0).lambda_init, first, 5e-7);
  expect_channels(timm({768, 12, 12, 64}, 0), {768, 768, 768, 768});
}

TEST(Models, DiffClip) {
  for (const bool causal : {false, true}) {
    const layer_config c = diffclip({64, 4, 4, 16}, causal);
    expect_heads(c, {0, 2}, {1, 3}, {0, 2}, {1, 3}, {0, 1});
    expect_constants(c, {64, 16, 32, lambda_rule::vectors, 0.8, 0.2, norm_kind::rms, 1e-5, true, false, half, causal});
  }
}

TEST(Models, Axolotl) {
  axolotl_options o;
  o.lambda_init = 0.25, o.mix = 0.5, o.rms_norm_eps = 1e-6;
  layer_config c = axolotl({64, 8, 4, 8}, o);
  expect_heads(c, {0, 1, 2, 3}, {4, 5, 6, 7}, {0, 0, 1, 1}, {2, 2, 3, 3}, {0, 0, 1, 1}, {2, 2, 3, 3});
  expect_constants(c, {64, 8, 8, lambda_rule::vectors, 0.25, 1, norm_kind::rms, 1e-6, true, true, half});
  EXPECT_EQ(c.lambda_factor, 0.5);
  o.split_heads = false;
  c = axolotl({64, 8, 4, 8}, o);
  expect_heads(c, {0, 1, 2, 3}, {4, 5, 6, 7}, {0, 0, 1, 1}, {2, 2, 3, 3}, {0, 0, 1, 1});
  expect_constants(c, {64, 8, 8, lambda_rule::vectors, 0.25, 1, norm_kind::rms, 1e-6, true, true, half});
  expect_channels(c, {64, 32, 16, 32});
  o.sub_norm = false;
  c = axolotl({64, 8, 4, 8}, o);
  expect_constants(c, {64, 8, 8, lambda_rule::vectors, 0.25, 1, norm_kind::none, 0, false, true, half});
}

// λ_init of a conversion that changed nothing is 0, and all of the mix is the default.
TEST(Models, AxolotlByDefault) {
  const layer_config c = axolotl({64, 8, 4, 8}, {});
  expect_constants(c, {64, 8, 8, lambda_rule::vectors, 0, 1, norm_kind::rms, 1e-5, true, true, half});
  EXPECT_EQ(c.lambda_factor, 1);
}

TEST(Models, RefuseOddHeads) {
  const layer_shape odd_queries{64, 7, 4, 8}, odd_keys{64, 8, 3, 8};
  axolotl_options doubled;
  doubled.split_heads = false;
  for (const layer_shape& s : {odd_queries, odd_keys})
    for (const layer_config& c :
         {unilm_v1(s, 0), unilm_v1_naive(s, 0), phi4flash(s, 1, 512), phi4flash_cross(s, 1), motif_2p6b(s, 0), timm(s, 0),
          timm(s, 0, lambda_rule::scalars), diffclip(s, true), axolotl(s, {}), axolotl(s, doubled)})
      EXPECT_EQ(refused(c), status::heads_missing);
  EXPECT_EQ(refused(motif_2(odd_keys, 0, 4)), status::heads_missing);
  EXPECT_EQ(refused(diffllama(odd_queries, 0)), status::heads_missing);
  EXPECT_EQ(refused(unilm_v2(odd_queries)), status::heads_missing);
}

TEST(Models, RefuseGroupsThatDoNotDivide) {
  const layer_shape s{64, 12, 8, 8};  // 6 pairs on 4
  for (const layer_config& c : {unilm_v1(s, 0), unilm_v1_naive(s, 0), phi4flash(s, 1, 512), phi4flash_cross(s, 1),
                                motif_2p6b(s, 0), timm(s, 0), axolotl(s, {})})
    EXPECT_EQ(refused(c), status::heads_kv_groups);
  EXPECT_EQ(refused(llama(s)), status::heads_kv_groups);
  EXPECT_EQ(refused(diffllama(s, 0)), status::heads_kv_groups);
  // Pairs that straddle two groups, as version 2 forbids: h = 6 or 3 on 4, 4 on 8. 5 on 4 fit in no way.
  EXPECT_EQ(refused(unilm_v2({64, 12, 4, 8})), status::heads_pair_across_kv_groups);
  EXPECT_EQ(refused(unilm_v2({64, 8, 8, 8})), status::heads_pair_across_kv_groups);
  EXPECT_EQ(refused(unilm_v2({64, 6, 4, 8})), status::heads_kv_groups);
  EXPECT_EQ(refused(unilm_v2({64, 10, 4, 8})), status::heads_kv_groups);
  // Noise heads: none, all, too many, fewer than none, signal heads that they do not divide, groups that share no keys evenly.
  for (const index_t noise : {0, 10, 11, -2, 3, 4}) {
    EXPECT_EQ(refused(motif_2({64, 10, 4, 8}, 0, noise)), status::heads_missing) << noise;
    EXPECT_EQ(refused(motif_3({64, 10, 2, 8}, noise, true)), status::heads_missing) << noise;
  }
  EXPECT_EQ(refused(motif_2({64, 15, 12, 8}, 0, 3)), status::heads_pair_across_kv_groups);  // 12 heads, 3 groups, 6 pairs
  EXPECT_EQ(refused(motif_2({64, 15, 4, 8}, 0, 3)), status::heads_pair_across_kv_groups);
  EXPECT_EQ(refused(motif_2({64, 15, 10, 8}, 0, 3)), status::heads_kv_groups);
  EXPECT_EQ(refused(motif_3({64, 15, 2, 8}, 3, false)), status::heads_pair_across_kv_groups);
}

TEST(Models, RefuseMissingSizes) {
  EXPECT_EQ(refused(llama({})), status::heads_missing);
  EXPECT_EQ(refused(llama({64, 8, 0, 8})), status::heads_missing);
  EXPECT_EQ(refused(llama({0, 8, 8, 8})), status::layer_width);
  EXPECT_EQ(refused(unilm_v1({64, 8, 8, 0}, 0)), status::layer_width);
  EXPECT_EQ(refused(unilm_v1({64, -8, 8, 8}, 0)), status::heads_missing);
}

TEST(Models, ACacheTakesItsShapeFromTheLayer) {
  const layer_config c = phi4flash({2560, 40, 20, 64}, 1, 512);
  const diffattn::kv_cache_config cache = diffattn::to_cache_config(c);
  EXPECT_TRUE(diffattn::same_heads(cache.heads, c.heads));
  EXPECT_EQ(cache.key_width, 64);
  EXPECT_EQ(cache.value_width, 64);
}

TEST(Models, AnEngineTakesTheAttentionCall) {
  const layer_config c = motif_3({64, 10, 2, 8}, 2, true);
  const diffattn::forward_args<float> gated = diffattn::to_forward_args(c, diffattn::layer_weights<float>());
  EXPECT_FALSE(gated.lambda.is_given());  // the caller's
  EXPECT_EQ(gated.norm.kind, norm_kind::none);
  axolotl_options o;
  o.lambda_init = 0.25, o.mix = 0.5, o.rms_norm_eps = 1e-3;
  layer_config mixed = axolotl({64, 8, 4, 2}, o);
  mixed.window = 7, mixed.scale = 0.5, mixed.gain = 3;
  const float one[] = {1, 0}, two[] = {0.5f, 3}, three[] = {0, 2}, norm[] = {1, 1, 1, 1};
  diffattn::layer_weights<float> w;
  w.lambda_q1 = one, w.lambda_k1 = two, w.lambda_q2 = one, w.lambda_k2 = three, w.norm = norm;
  const diffattn::forward_args<float> args = diffattn::to_forward_args(mixed, w);
  EXPECT_FLOAT_EQ(args.lambda.at(0, 0, 0), 0.44936064f);  // (exp(0.5) - exp(0) + 0.25) / 2
  EXPECT_EQ(args.norm.weight, norm);
  EXPECT_EQ(args.norm.eps, 1e-3f);
  EXPECT_EQ(args.norm.gain, 3);
  EXPECT_TRUE(args.mask.causal);
  EXPECT_EQ(args.mask.window, 7);
  EXPECT_EQ(args.scale, 0.5f);
  const layer_config scalars = timm({64, 4, 4, 16}, 0, lambda_rule::scalars);
  w.lambda_a = two, w.lambda_b = three;
  EXPECT_NEAR(diffattn::lambda_of(scalars, w), 0.848721, 5e-7);  // exp(0.5) - exp(0) + 0.2
}

}  // namespace
