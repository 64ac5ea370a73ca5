// SPDX-License-Identifier: MIT
// A decode step of a whole layer, one token of one sequence, takes no memory from the heap.
// And the call that brings its own workspace.

#include <gtest/gtest.h>

#include <diffattn/models/layer.hpp>
#include <diffattn/models/llama.hpp>
#include <diffattn/models/motif.hpp>
#include <diffattn/models/phi4flash.hpp>
#include <diffattn/models/unilm.hpp>
#include <vector>

#include "../support/allocations.hpp"

namespace {

using diffattn::index_t;
using diffattn::kv_cache_kind;
using diffattn::status;
using diffattn::storage;
namespace models = diffattn::models;

/// One token, with one array for every weight and the rotary table.
struct step {
  std::vector<float> numbers = std::vector<float>(std::size_t{1} << 20, 0.01f), out;
  diffattn::layer_args<float> args;

  explicit step(const diffattn::layer_config& config) : out(static_cast<std::size_t>(config.model_width)) {
    args.config = config;
    diffattn::layer_weights<float>& w = args.weights;
    const diffattn::linear<float> matrix{numbers.data(), numbers.data()};
    w.q = w.k = w.v = w.out = matrix;
    if (config.lambda == diffattn::lambda_rule::gate) w.lambda_gate = matrix;
    if (config.lambda == diffattn::lambda_rule::vectors) w.lambda_q1 = w.lambda_k1 = w.lambda_q2 = w.lambda_k2 = numbers.data();
    if (config.output_gate) w.output_gate = matrix;
    if (config.norm_weight) w.norm = numbers.data();
    if (config.rotates) args.rope = {numbers.data(), numbers.data(), 200, config.head_width, config.rope, 0};
    args.x = diffattn::view<const float>(numbers.data(), 1, 1, 1, config.model_width);
    args.out = diffattn::view(out.data(), 1, 1, 1, config.model_width);
  }
};

TEST(Layer, TheCallWithoutWorkspace) {
  step s(models::unilm_v1({512, 8, 4, 64}, 1));
  diffattn::owned_workspace scratch(diffattn::workspace_bytes(s.args));
  ASSERT_EQ(diffattn::forward(s.args, scratch.view()), status::ok);
  const std::vector<float> expected = s.out;
  s.out.assign(s.out.size(), 0.0f);
  diffattn::forward(s.args);
  EXPECT_EQ(s.out, expected);
  s.args.rope = {};
  EXPECT_THROW(diffattn::forward(s.args), std::invalid_argument);
}

#if defined(DIFFATTN_TEST_TRAPS_MALLOC)

/// Steps through a cache, and what a loop calls besides.
void expect_no_allocation(const diffattn::layer_config& config, const diffattn::kv_cache_config& cache_config) {
  std::vector<unsigned char> memory(diffattn::kv_cache_bytes(cache_config));
  diffattn::kv_cache cache;
  ASSERT_EQ(cache.open(cache_config, {memory.data(), memory.size()}), status::ok);
  step s(config);
  s.args.cache = &cache;
  std::vector<unsigned char> scratch(diffattn::workspace_bytes(s.args, 1, 200));
  const diffattn::workspace workspace{scratch.data(), scratch.size()};
  bool all_ok = true;
  test::allocations = 0;
  test::armed = true;
  for (int i = 0; i < 150; ++i) {
    all_ok &= diffattn::check(s.args) == status::ok && diffattn::workspace_bytes(s.args) <= workspace.bytes;
    all_ok &= diffattn::forward(s.args, workspace) == status::ok;
  }
  const status wrong = diffattn::forward(s.args, {});
  test::armed = false;
  EXPECT_TRUE(all_ok);
  EXPECT_EQ(wrong, status::workspace_null);
  EXPECT_EQ(test::allocations, 0);
}

TEST(LayerAllocation, DecodingTakesNone) {
  diffattn::layer_config normed = models::phi4flash({512, 8, 4, 64}, 1, 40);
  normed.qk_norm = normed.scale_norm = diffattn::norm_kind::rms;
  for (const diffattn::layer_config& config : {models::unilm_v1({512, 8, 4, 64}, 1), models::motif_3({300, 10, 2, 48}, 2, true),
                                               models::llama({512, 8, 2, 64}), normed})
    for (const kv_cache_kind kind : {kv_cache_kind::contiguous, kv_cache_kind::ring, kv_cache_kind::paged})
      for (const storage type : {storage::f32, storage::bf16, storage::q6}) {
        diffattn::kv_cache_config cache = diffattn::to_cache_config(config);
        cache.kind = kind, cache.keys = cache.values = type;
        cache.capacity = config.window > 0 && kind == kv_cache_kind::ring ? config.window : 200;
        expect_no_allocation(config, cache);
      }
}

#else
TEST(LayerAllocation, DecodingTakesNone) {
  GTEST_SKIP() << "malloc cannot be replaced here";
}
#endif

}  // namespace
