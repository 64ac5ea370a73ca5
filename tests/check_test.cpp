// SPDX-License-Identifier: MIT
// Every status is returned for its cause, says which argument is at fault, and leaves all outputs as they were.

#include <gtest/gtest.h>

#include <cstring>
#include <diffattn/status.hpp>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "support/calls.hpp"
#include "support/random.hpp"

namespace {

using diffattn::attention_mask;
using diffattn::head_indices;
using diffattn::head_map;
using diffattn::index_t;
using diffattn::key_range;
using diffattn::kv_rows;
using diffattn::kv_view;
using diffattn::schedule_choice;
using diffattn::status;
using diffattn::storage;

constexpr float sentinel = -5.5f;
constexpr index_t huge = index_t{1} << 55;
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

class counting_executor : public test::any_executor {
 public:
  explicit counting_executor(index_t workers) : workers_(workers) {}
  index_t workers() const noexcept override { return workers_; }
  void run_tasks(index_t tasks, task_function f, void* context) override {
    ++runs;
    for (index_t task = 0; task < tasks; ++task) f(context, task, task % workers_);
  }
  int runs = 0;

 private:
  index_t workers_;
};

/// A valid call: 2 batch entries, 5 queries on 6 keys, 4 heads on 2 key/value pairs, d = 3, dv = 4.
struct call {
  std::vector<float> q = std::vector<float>(240, 1.0f), k = std::vector<float>(144, 1.0f), v = std::vector<float>(96, 1.0f);
  std::vector<float> out = std::vector<float>(160, sentinel), out1 = out, out2 = out, lse1 = std::vector<float>(40, sentinel),
                     lse2 = lse1;
  std::vector<float> vector = std::vector<float>(64, 1.0f);
  std::vector<head_indices> table = std::vector<head_indices>(4);
  key_range ranges[2] = {{0, 6}, {1, 4}};
  std::vector<unsigned char> scratch = std::vector<unsigned char>(1 << 20);
  diffattn::workspace workspace{scratch.data(), scratch.size()};
  index_t workers = 1;
  bool touched = false;  // the test itself has written to an output
  diffattn::forward_args<float> args;

  call() {
    args.q = diffattn::view<const float>(q.data(), 2, 5, 8, 3), args.k = diffattn::view<const float>(k.data(), 2, 6, 4, 3);
    args.v = diffattn::view<const float>(v.data(), 2, 6, 2, 4), args.out = diffattn::view(out.data(), 2, 5, 4, 4);
    args.heads = head_map::interleaved(4, 2);
    args.lambda = 0.5f;
    args.out1 = diffattn::view(out1.data(), 2, 5, 4, 4), args.out2 = diffattn::view(out2.data(), 2, 5, 4, 4);
    args.lse1 = {lse1.data(), 20, 4, 1}, args.lse2 = {lse2.data(), 20, 4, 1};
    args.mask.key_ranges = ranges;
    for (std::size_t h = 0; h < 4; ++h) table[h] = args.heads[static_cast<index_t>(h)];
  }
  void use_table() { args.heads = head_map::table(table.data(), 4); }

  // Two sequences in one batch entry: 2 + 3 queries on 4 + 2 keys.
  std::vector<std::int32_t> query_starts = {0, 2, 5}, key_starts = {0, 4, 6};
  std::vector<index_t> prefixes = {1, 2};
  void use_packed() {
    args.q.batch = args.k.batch = args.v.batch = args.out.batch = args.out1.batch = args.out2.batch = 1;
    args.mask.key_ranges = nullptr, args.mask.sequences = 2;
    args.mask.query_starts = query_starts.data(), args.mask.key_starts = key_starts.data();
  }
  void use_prefixes() { args.mask.causal = true, args.mask.prefixes = prefixes.data(); }

  // Every rule: arrays of 2 entries, 4 heads, 5 queries and 6 keys; blocks of 2 queries and 4 keys, so 3 rows of 2 at most.
  std::vector<float> bias = std::vector<float>(240, 0.5f), slopes = std::vector<float>(4, 0.5f), sinks = slopes;
  std::vector<unsigned char> visible = std::vector<unsigned char>(240, 1);
  std::vector<index_t> block_begins = {0, 1, 3, 4}, block_keys = {0, 0, 1, 1};
  diffattn::logit_rules<float> second;
  diffattn::logit_rules<float> every_rule() {
    diffattn::logit_rules<float> r;
    r.soft_cap = 2, r.slopes = slopes.data(), r.sinks = sinks.data();
    r.bias = {bias.data(), 120, 30, 6, 1}, r.visible = {visible.data(), 120, 30, 6, 1};
    r.blocks = {2, 4, block_begins.data(), block_keys.data(), 0, 0};
    r.predicate.sees = [](const void*, index_t, index_t, index_t, index_t) { return true; };
    return r;
  }
  void use_rules() { args.logits = every_rule(); }
  void use_second_rules() { second = every_rule(), args.logits_2 = &second; }

  // The same keys and values in a cache of 3 sequences, in pages of 2 tokens; page 4 is free.
  std::vector<float> pool_k = std::vector<float>(8 * 24, 1.0f), pool_v = std::vector<float>(8 * 16, 1.0f);
  std::vector<std::int32_t> pages = {3, 0, 5, 1, 6, 2, 7, -1, -1}, references = {1, 1, 1, 1, 0, 1, 1, 1};
  std::vector<index_t> lengths = {6, 6, 1}, begins = {0, 0, 0}, sequences = {0, 1};
  void use_cache() {
    kv_view& c = args.cache;
    c.keys = {pool_k.data(), storage::f32, 4, 3, 96, 12, 48}, c.values = {pool_v.data(), storage::f32, 2, 4, 64, 16, 32};
    c.heads = args.heads, c.sequences = 3, c.page_tokens = 2, c.pages = 8, c.table_pages = 3, c.table = pages.data();
    c.lengths = lengths.data(), c.begins = begins.data(), c.references = references.data();
    args.k = args.v = {}, args.sequences = sequences.data();
  }
  /// One page of 6 tokens for each sequence; 9 have been written.
  void use_ring() {
    use_cache();
    kv_view& c = args.cache;
    c.keys.token_stride = 48, c.keys.page_stride = 288, c.values.page_stride = 192;
    c.pages = c.sequences = 2, c.page_tokens = 6, c.table_pages = 1, c.table = nullptr, c.references = nullptr;
    lengths = {9, 9}, begins = {3, 3}, c.lengths = lengths.data(), c.begins = begins.data();
    args.mask.key_ranges = nullptr, args.sequences = nullptr;
  }

  /// Runs; on an error nothing may have been written and no task started.
  status run() {
    counting_executor executor(workers);
    const status s = test::run(args, workspace, executor);
    if (s == status::ok) return s;
    EXPECT_EQ(executor.runs, 0) << message(s);
    if (touched) return s;
    for (const std::vector<float>* o : {&out, &out1, &out2, &lse1, &lse2})
      for (const float x : *o) EXPECT_EQ(x, sentinel) << message(s);
    return s;
  }
};

/// The same array where `out` is.
template <class E>
const E* moved(std::vector<float>& out, const std::vector<E>& array) {
  std::memcpy(out.data(), array.data(), array.size() * sizeof(E));
  return reinterpret_cast<const E*>(out.data());
}

struct misuse {
  status expected;
  void (*make)(call&);
};

const misuse misuses[] = {
    {status::ok, [](call&) {}},
    {status::q_null, [](call& c) { c.args.q.data = nullptr; }},
    {status::k_null, [](call& c) { c.args.k.data = nullptr; }},
    {status::v_null, [](call& c) { c.args.v.data = nullptr; }},
    {status::out_null, [](call& c) { c.args.out.data = nullptr; }},
    {status::q_size, [](call& c) { c.args.q.batch = -1; }},
    {status::q_size, [](call& c) { c.args.q.width = 0; }},
    {status::q_size, [](call& c) { c.args.q.width = -3; }},
    {status::q_size, [](call& c) { c.args.q.tokens = huge; }},
    {status::q_size, [](call& c) { c.args.q.token_stride = huge; }},
    {status::q_size, [](call& c) { c.args.q.head_stride = -huge; }},
    {status::q_size, [](call& c) { c.args.q.batch_stride = std::numeric_limits<index_t>::min(); }},
    {status::q_size,
     [](call& c) {  // each extent fits, their product does not; strides of 0 make all the extents small
       c.args.q.batch = c.args.q.tokens = c.args.q.heads = index_t{1} << 20;
       c.args.q.batch_stride = c.args.q.token_stride = c.args.q.head_stride = 0;
     }},
    {status::k_size, [](call& c) { c.args.k.tokens = -1; }},
    {status::k_size, [](call& c) { c.args.k.heads = huge; }},
    {status::v_size, [](call& c) { c.args.v.heads = -1; }},
    {status::v_size, [](call& c) { c.args.v.batch_stride = std::numeric_limits<index_t>::max(); }},
    {status::out_size, [](call& c) { c.args.out.width = 0; }},
    {status::out_size, [](call& c) { c.args.out.token_stride = -huge; }},
    {status::q_width_stride, [](call& c) { c.args.q.width_stride = 2; }},
    {status::k_width_stride, [](call& c) { c.args.k.width_stride = 0; }},
    {status::v_width_stride, [](call& c) { c.args.v.width_stride = -1; }},
    {status::out_width_stride, [](call& c) { c.args.out.width_stride = 2; }},
    {status::k_batch, [](call& c) { c.args.k.batch = 1; }},
    {status::v_batch, [](call& c) { c.args.v.batch = 1; }},
    {status::out_batch, [](call& c) { c.args.out.batch = 1; }},
    {status::v_tokens, [](call& c) { c.args.v.tokens = 5; }},
    {status::out_tokens, [](call& c) { c.args.out.tokens = 4; }},
    {status::k_width, [](call& c) { c.args.k.width = 2; }},
    {status::out_width, [](call& c) { c.args.out.width = 3; }},
    {status::out_width, [](call& c) { c.args.v.width = 3; }},
    {status::heads_missing, [](call& c) { c.args.heads = head_map(); }},
    {status::heads_missing, [](call& c) { c.args.heads = head_map::interleaved(4, 0); }},
    {status::heads_missing, [](call& c) { c.args.heads = head_map::interleaved(-4, -2); }},
    {status::heads_missing, [](call& c) { c.args.heads = head_map::grouped(4, 0, 2); }},
    {status::heads_missing, [](call& c) { c.args.heads = head_map::interleaved(std::numeric_limits<index_t>::max(), 1); }},
    {status::heads_table_null, [](call& c) { c.args.heads = head_map::table(nullptr, 4); }},
    {status::heads_kv_groups, [](call& c) { c.args.heads = head_map::interleaved(4, 3); }},
    {status::heads_kv_groups, [](call& c) { c.args.heads = head_map::halves(4, 3); }},
    {status::heads_kv_groups, [](call& c) { c.args.heads = head_map::grouped(4, 3, 1); }},
    {status::heads_kv_groups, [](call& c) { c.args.heads = head_map::single(4, 3); }},
    {status::heads_kv_groups, [](call& c) { c.args.heads = head_map::interleaved(2, 4); }},
    {status::heads_pair_across_kv_groups, [](call& c) { c.args.heads = head_map::shared(3, 2); }},  // E59
    {status::heads_pair_across_kv_groups, [](call& c) { c.args.heads = head_map::shared(4, 8); }},
    {status::heads_pair_across_kv_groups, [](call& c) { c.args.heads = head_map::grouped(4, 4, 2); }},
    {status::q_heads, [](call& c) { c.args.q.heads = 7; }},
    {status::q_heads, [](call& c) { c.args.q.heads = 9; }},
    {status::q_heads, [](call& c) { c.use_table(), c.table[2].query_2 = 8; }},
    {status::q_heads, [](call& c) { c.use_table(), c.table[2].query_1 = -1; }},
    {status::k_heads, [](call& c) { c.args.k.heads = 3; }},
    {status::k_heads, [](call& c) { c.use_table(), c.table[3].key_1 = 4; }},
    {status::k_heads, [](call& c) { c.use_table(), c.table[3].key_2 = -1; }},
    {status::v_heads, [](call& c) { c.args.v.heads = 1; }},
    {status::v_heads, [](call& c) { c.use_table(), c.table[0].value_1 = 2; }},
    {status::v_heads, [](call& c) { c.use_table(), c.table[0].value_2 = -2; }},
    {status::out_heads, [](call& c) { c.args.out.heads = 3; }},
    {status::heads_value_layout, [](call& c) { c.use_table(), c.table[1].value_2 = 1; }},
    {status::lambda_missing, [](call& c) { c.args.lambda = diffattn::lambda_view<float>(); }},
    {status::lambda_missing, [](call& c) { c.args.lambda = diffattn::lambda_view<float>::per_head(nullptr); }},
    {status::lambda_missing, [](call& c) { c.args.lambda = diffattn::lambda_view<float>::gate(nullptr, 5, 4); }},
    {status::lambda_shape, [](call& c) { c.args.lambda = diffattn::lambda_view<float>::per_token(c.vector.data(), 4, 4); }},
    {status::lambda_shape, [](call& c) { c.args.lambda = diffattn::lambda_view<float>::gate(c.vector.data(), 5, 3); }},
    {status::lambda_shape,
     [](call& c) {
       c.args.lambda = diffattn::lambda_view<float>::strided({c.vector.data(), huge, 0, 0});
     }},
    {status::alpha_missing, [](call& c) { c.args.alpha = diffattn::lambda_view<float>(); }},
    {status::alpha_missing, [](call& c) { c.args.alpha = diffattn::lambda_view<float>::per_head(nullptr); }},
    {status::alpha_shape, [](call& c) { c.args.alpha = diffattn::lambda_view<float>::per_token(c.vector.data(), 5, 5); }},
    {status::scale_not_finite, [](call& c) { c.args.scale = nan; }},
    {status::scale_not_finite, [](call& c) { c.args.scale = -infinity; }},
    {status::scale_not_finite, [](call& c) { c.args.scale = std::numeric_limits<float>::max(); }},
    {status::norm_eps, [](call& c) { c.args.norm.eps = -1e-9f; }},
    {status::norm_eps, [](call& c) { c.args.norm.eps = nan; }},
    {status::norm_gain, [](call& c) { c.args.norm.gain = infinity; }},
    {status::norm_bias, [](call& c) { c.args.norm.bias = c.vector.data(); }},
    {status::mask_offset, [](call& c) { c.args.mask.causal = true, c.args.mask.offset = (index_t{1} << 62) + 1; }},
    {status::mask_offset, [](call& c) { c.args.mask.offset = (index_t{1} << 62) + 1; }},
    {status::mask_offset, [](call& c) { c.args.mask.causal = true, c.args.mask.offset = -(index_t{1} << 62) - 1; }},
    {status::mask_window, [](call& c) { c.args.mask.causal = true, c.args.mask.window = 0; }},
    {status::mask_window, [](call& c) { c.args.mask.causal = true, c.args.mask.window = -2; }},
    {status::mask_window_not_causal, [](call& c) { c.args.mask.window = 3; }},
    {status::mask_key_range, [](call& c) { c.ranges[1].begin = -1; }},
    {status::mask_key_range, [](call& c) { c.ranges[1].end = 7; }},
    {status::mask_key_range,
     [](call& c) {
       c.ranges[0] = {4, 3};
     }},
    {status::mask_prefix_not_causal, [](call& c) { c.args.mask.prefixes = c.prefixes.data(); }},
    {status::mask_prefix_not_causal, [](call& c) { c.use_packed(), c.args.mask.prefixes = c.prefixes.data(); }},
    {status::mask_prefix, [](call& c) { c.use_prefixes(), c.prefixes[1] = 7; }},
    {status::mask_prefix, [](call& c) { c.use_prefixes(), c.prefixes[0] = -1; }},
    {status::mask_prefix, [](call& c) { c.use_packed(), c.use_prefixes(), c.prefixes[1] = 3; }},
    {status::mask_prefix, [](call& c) { c.use_packed(), c.use_prefixes(), c.prefixes[0] = -1; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.args.mask.query_starts = nullptr; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.args.mask.key_starts = nullptr; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.args.mask.query_starts = c.args.mask.key_starts = nullptr; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.args.mask.sequences = 0; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.args.mask.sequences = -1; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.args.mask.sequences = std::numeric_limits<index_t>::max(); }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.query_starts[0] = 1; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.query_starts[2] = 4; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.query_starts[2] = 6; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.query_starts[1] = 6; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.query_starts[1] = -1; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.key_starts[0] = -1; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.key_starts[1] = 7; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.key_starts[2] = 7; }},
    {status::mask_packed, [](call& c) { c.use_packed(), c.key_starts[2] = 3; }},
    {status::mask_packed_batch,
     [](call& c) {
       c.use_packed(), c.args.q.batch = c.args.k.batch = c.args.v.batch = c.args.out.batch = 2;
       c.args.out1.batch = c.args.out2.batch = 2;
     }},
    {status::mask_packed_key_ranges, [](call& c) { c.use_packed(), c.args.mask.key_ranges = c.ranges; }},
    {status::logits_soft_cap, [](call& c) { c.args.logits.soft_cap = -1; }},
    {status::logits_soft_cap, [](call& c) { c.args.logits.soft_cap = nan; }},
    {status::logits_soft_cap, [](call& c) { c.args.logits.soft_cap = infinity; }},
    {status::logits_soft_cap, [](call& c) { c.args.logits.soft_cap = std::numeric_limits<float>::max(); }},
    {status::logits_soft_cap, [](call& c) { c.use_second_rules(), c.second.soft_cap = -1; }},
    {status::logits_strides, [](call& c) { c.use_rules(), c.args.logits.bias.batch_stride = huge * 8; }},
    {status::logits_strides, [](call& c) { c.use_rules(), c.args.logits.bias.head_stride = -huge * 8; }},
    {status::logits_strides,
     [](call& c) {
       c.use_rules(), c.args.logits.bias.query_stride = std::numeric_limits<index_t>::min();
     }},
    {status::logits_strides, [](call& c) { c.use_rules(), c.args.logits.visible.key_stride = huge * 8; }},
    {status::logits_strides, [](call& c) { c.use_rules(), c.args.logits.blocks.batch_stride = huge * 8; }},
    {status::logits_strides,
     [](call& c) {
       c.use_rules(), c.args.logits.blocks.head_stride = std::numeric_limits<index_t>::max();
     }},
    {status::logits_strides, [](call& c) { c.use_second_rules(), c.second.bias.key_stride = huge * 8; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.args.logits.blocks.query_block = 0; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.args.logits.blocks.key_block = -1; }},
    {status::logits_blocks,
     [](call& c) {
       c.use_rules(), c.args.logits.blocks.key_block = std::numeric_limits<index_t>::max();
     }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.args.logits.blocks.query_block = huge; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.args.logits.blocks.keys = nullptr; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.args.logits.blocks.begins = nullptr; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.block_begins[0] = -1; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.block_begins[1] = 4; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.block_keys[0] = -1; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.block_keys[3] = 2; }},
    {status::logits_blocks, [](call& c) { c.use_rules(), c.block_keys[2] = 0; }},
    {status::logits_blocks, [](call& c) { c.use_second_rules(), c.block_keys[1] = 1; }},
    {status::logits_predicate,
     [](call& c) {
       c.use_rules(), c.args.logits.predicate.sees = nullptr, c.args.logits.predicate.context = &c;
     }},
    {status::logits_predicate,
     [](call& c) {
       c.args.logits.predicate.tile = [](const void*, index_t, index_t, index_t, index_t, key_range) {
         return diffattn::sight::some;
       };
     }},
    {status::logits_predicate, [](call& c) { c.use_second_rules(), c.second.predicate = {&c, nullptr, nullptr}; }},
    {status::out_strides, [](call& c) { c.args.out.head_stride = 0; }},
    {status::out_strides, [](call& c) { c.args.out.token_stride = 8; }},
    {status::out_strides, [](call& c) { c.args.out.head_stride = -3; }},
    {status::out_overlaps_q, [](call& c) { c.args.q.data = c.out.data() + 159; }},
    {status::out_overlaps_k, [](call& c) { c.args.k.data = c.out.data() - 143; }},
    {status::out_overlaps_v, [](call& c) { c.args.v.data = c.out.data(); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.args.lambda = diffattn::lambda_view<float>::per_head(c.out.data() + 159); }},
    {status::out_overlaps_parameter, [](call& c) { c.args.alpha = diffattn::lambda_view<float>::per_head(c.out.data() - 3); }},
    {status::out_overlaps_parameter, [](call& c) { c.args.norm.weight = c.out.data(); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.args.norm.kind = diffattn::norm_kind::group, c.args.norm.bias = c.out.data() + 8; }},
    {status::out_overlaps_parameter,
     [](call& c) {
       c.use_table();
       std::memcpy(c.out.data(), c.table.data(), 4 * sizeof(head_indices));
       c.args.heads = head_map::table(reinterpret_cast<head_indices*>(c.out.data()), 4), c.touched = true;
     }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.args.mask.key_ranges = moved(c.out, std::vector<key_range>(c.ranges, c.ranges + 2)); }},
    {status::out_overlaps_parameter,
     [](call& c) {
       c.touched = true, c.use_prefixes(), c.args.mask.prefixes = moved(c.out, c.prefixes);
     }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.use_packed(), c.args.mask.query_starts = moved(c.out, c.query_starts); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.use_packed(), c.args.mask.key_starts = moved(c.out, c.key_starts); }},
    {status::out_overlaps_parameter,
     [](call& c) {
       c.touched = true, c.use_rules(), c.args.logits.slopes = moved(c.out, c.slopes);
     }},
    {status::out_overlaps_parameter,
     [](call& c) {
       c.touched = true, c.use_rules(), c.args.logits.sinks = moved(c.out, c.sinks);
     }},
    {status::out_overlaps_parameter, [](call& c) { c.use_rules(), c.args.logits.bias.data = c.out.data() + 159; }},
    {status::out_overlaps_parameter,  // the last row, which comes first in memory
     [](call& c) {
       c.use_rules(), c.args.logits.bias = {c.out.data() + 159 + 29, 0, 0, -6, -1};
     }},
    {status::out_overlaps_parameter,
     [](call& c) { c.use_rules(), c.args.logits.visible.data = reinterpret_cast<unsigned char*>(c.out.data() + 160) - 1; }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.use_rules(), c.args.logits.blocks.begins = moved(c.out, c.block_begins); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.use_rules(), c.args.logits.blocks.keys = moved(c.out, c.block_keys); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.use_second_rules(), c.second.slopes = moved(c.out, c.slopes); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.use_second_rules(), c.second.sinks = moved(c.out, c.sinks); }},
    {status::out_overlaps_parameter, [](call& c) { c.use_second_rules(), c.second.bias.data = c.out.data(); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.use_second_rules(), c.second.visible.data = reinterpret_cast<unsigned char*>(c.out.data()); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.use_second_rules(), c.second.blocks.begins = moved(c.out, c.block_begins); }},
    {status::out_overlaps_parameter,
     [](call& c) { c.touched = true, c.use_second_rules(), c.second.blocks.keys = moved(c.out, c.block_keys); }},
    {status::lse_overlap, [](call& c) { c.use_rules(), c.args.logits.bias.data = c.lse1.data(); }},
    {status::raw_out_overlap, [](call& c) { c.use_rules(), c.args.logits.bias.data = c.out2.data() + 159; }},
    {status::workspace_overlap, [](call& c) { c.use_rules(), c.workspace.data = c.bias.data(); }},
    {status::workspace_overlap, [](call& c) { c.use_rules(), c.workspace.data = c.block_keys.data() + 3; }},
    {status::workspace_overlap, [](call& c) { c.use_packed(), c.workspace.data = c.key_starts.data(); }},
    {status::lse_strides, [](call& c) { c.args.lse1.head_stride = 0; }},
    {status::lse_strides, [](call& c) { c.args.lse2.batch_stride = huge; }},
    {status::lse_overlap, [](call& c) { c.args.lse1.data = c.out.data(); }},
    {status::lse_overlap, [](call& c) { c.args.lse2.data = c.lse1.data() + 1; }},
    {status::lse_overlap, [](call& c) { c.args.lse2.data = c.q.data(); }},
    {status::lse_overlap, [](call& c) { c.args.norm.weight = c.lse1.data(); }},
    {status::raw_out_shape, [](call& c) { c.args.out1.tokens = 4; }},
    {status::raw_out_shape, [](call& c) { c.args.out2.width_stride = 2; }},
    {status::raw_out_shape, [](call& c) { c.args.out2.token_stride = huge; }},
    {status::raw_out_strides, [](call& c) { c.args.out1.batch_stride = 0; }},
    {status::raw_out_overlap, [](call& c) { c.args.out1.data = c.out.data(); }},
    {status::raw_out_overlap, [](call& c) { c.args.out2.data = c.out1.data(); }},
    {status::raw_out_overlap, [](call& c) { c.args.out2.data = c.v.data(); }},
    {status::executor_workers, [](call& c) { c.workers = 0; }},
    {status::executor_workers, [](call& c) { c.workers = -1; }},
    {status::workspace_overflow, [](call& c) { c.workers = index_t{1} << 47; }},
    {status::workspace_overflow, [](call& c) { c.workers = index_t{1} << 50; }},
    {status::workspace_overflow, [](call& c) { c.workers = std::numeric_limits<index_t>::max(); }},
    {status::workspace_null, [](call& c) { c.workspace.data = nullptr; }},
    {status::workspace_too_small, [](call& c) { c.workspace.bytes = test::workspace_bytes(c.args) - 1; }},
    {status::workspace_too_small, [](call& c) { c.workspace.bytes = 0; }},
    {status::workspace_too_small, [](call& c) { c.workers = 2, c.workspace.bytes = test::workspace_bytes(c.args); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.out.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<float*>(c.args.q.data); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<float*>(c.args.k.data); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = const_cast<float*>(c.args.v.data); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.lse1.data(); }},
    {status::workspace_overlap,
     [](call& c) { c.args.lambda = diffattn::lambda_view<float>::per_head(reinterpret_cast<float*>(c.scratch.data() + 128)); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.out2.data(); }},
    {status::schedule_unknown, [](call& c) { c.args.schedule = static_cast<schedule_choice>(3); }},
    {status::schedule_unknown, [](call& c) { c.args.schedule = static_cast<schedule_choice>(-1); }},
    {status::workspace_too_small,
     [](call& c) { c.args.schedule = schedule_choice::stream, c.workspace.bytes = test::workspace_bytes(c.args) - 1; }},
    {status::workspace_too_small,
     [](call& c) { c.args.schedule = schedule_choice::panels, c.workspace.bytes = test::workspace_bytes(c.args) - 1; }},
};

/// The same with a cache.
const misuse cache_misuses[] = {
    {status::ok, [](call&) {}},
    {status::cache_and_tensors, [](call& c) { c.args.k = diffattn::view<const float>(c.k.data(), 2, 6, 4, 3); }},
    {status::cache_and_tensors, [](call& c) { c.args.v.data = c.v.data(); }},
    {status::cache_and_tensors, [](call& c) { c.args.v.tokens = 1; }},
    {status::cache_sequence, [](call& c) { c.args.sequences = nullptr; }},  // 2 entries, 3 sequences
    {status::cache_sequence, [](call& c) { c.sequences[1] = 3; }},
    {status::cache_sequence, [](call& c) { c.sequences[0] = -1; }},
    {status::cache_sequence, [](call& c) { c.sequences[0] = std::numeric_limits<index_t>::min(); }},
    {status::cache_missing,
     [](call& c) {  // only for caches
       c.args.cache = {}, c.args.k = diffattn::view<const float>(c.k.data(), 2, 6, 4, 3),
       c.args.v = diffattn::view<const float>(c.v.data(), 2, 6, 2, 4);
     }},
    {status::cache_shape, [](call& c) { c.args.cache.sequences = -1; }},
    {status::cache_shape, [](call& c) { c.args.cache.sequences = huge; }},
    {status::cache_shape, [](call& c) { c.args.cache.pages = -1; }},
    {status::cache_shape, [](call& c) { c.args.cache.pages = index_t{1} << 31; }},
    {status::cache_shape, [](call& c) { c.args.cache.page_tokens = 0; }},
    {status::cache_shape, [](call& c) { c.args.cache.page_tokens = -2; }},
    {status::cache_shape, [](call& c) { c.args.cache.page_tokens = huge; }},
    {status::cache_shape, [](call& c) { c.args.cache.table_pages = 0; }},
    {status::cache_shape, [](call& c) { c.args.cache.table_pages = std::numeric_limits<index_t>::max(); }},
    {status::cache_shape, [](call& c) { c.args.cache.table = nullptr; }},  // but 3 pages to a sequence
    {status::cache_shape, [](call& c) { c.args.cache.keys.data = nullptr; }},
    {status::cache_shape, [](call& c) { c.args.cache.values.data = nullptr; }},
    {status::cache_shape, [](call& c) { c.args.cache.keys.heads = 0; }},
    {status::cache_shape, [](call& c) { c.args.cache.values.heads = huge; }},
    {status::cache_shape, [](call& c) { c.args.cache.keys.width = -3; }},
    {status::cache_shape, [](call& c) { c.args.cache.values.width = std::numeric_limits<index_t>::max(); }},
    {status::cache_shape, [](call& c) { c.args.cache.keys.page_stride = std::numeric_limits<index_t>::min(); }},
    {status::cache_shape, [](call& c) { c.args.cache.keys.head_stride = huge * 8; }},
    {status::cache_shape, [](call& c) { c.args.cache.values.token_stride = -huge * 8; }},
    {status::cache_shape, [](call& c) { c.lengths[1] = -1; }},
    {status::cache_shape, [](call& c) { c.lengths[1] = std::numeric_limits<index_t>::max(); }},
    {status::cache_shape, [](call& c) { c.begins[0] = -1; }},
    {status::cache_shape, [](call& c) { c.begins[0] = 7; }},
    {status::cache_storage, [](call& c) { c.args.cache.keys.type = storage::f64; }},
    {status::cache_storage, [](call& c) { c.args.cache.values.type = storage::f64; }},
    {status::cache_storage, [](call& c) { c.args.cache.keys.type = static_cast<storage>(6); }},
    {status::cache_storage, [](call& c) { c.args.cache.values.type = static_cast<storage>(-1); }},
    {status::k_width, [](call& c) { c.args.cache.keys.width = 2; }},
    {status::out_width, [](call& c) { c.args.cache.values.width = 3; }},
    {status::k_heads, [](call& c) { c.args.cache.keys.heads = 3; }},
    {status::v_heads, [](call& c) { c.args.cache.values.heads = 1; }},
    {status::cache_heads, [](call& c) { c.args.cache.heads = head_map::interleaved_repeated(4, 2); }},
    {status::cache_heads, [](call& c) { c.args.cache.heads = head_map::interleaved(3, 1); }},
    {status::cache_heads, [](call& c) { c.args.cache.heads.heads = -3; }},
    {status::cache_heads, [](call& c) { c.args.cache.heads = head_map::table(nullptr, 4); }},
    {status::cache_heads,
     [](call& c) {
       c.table[1].key_1 = 3;
       c.args.cache.heads = head_map::table(c.table.data(), 4);
     }},
    {status::mask_packed_cache, [](call& c) { c.use_packed(); }},
    {status::mask_prefix, [](call& c) { c.use_prefixes(), c.args.mask.key_ranges = nullptr, c.lengths[1] = 1; }},
    {status::mask_key_range, [](call& c) { c.ranges[0].end = 7; }},
    {status::mask_key_range, [](call& c) { c.sequences[1] = 2; }},  // keys 1 … 3 of a sequence of one token
    {status::cache_range, [](call& c) { c.lengths[0] = 7; }},       // room for 6
    {status::cache_range, [](call& c) { c.begins[0] = 1; }},
    {status::cache_range, [](call& c) { c.use_ring(); }},  // tokens 0, 1 and 2 are overwritten
    {status::cache_range,
     [](call& c) {  // row 0 sees tokens 2, 3 and 4
       c.use_ring(), c.args.mask.causal = true, c.args.mask.window = 3;
     }},
    {status::cache_page, [](call& c) { c.pages[1] = -1; }},
    {status::cache_page, [](call& c) { c.pages[1] = 8; }},
    {status::cache_page, [](call& c) { c.pages[4] = std::numeric_limits<std::int32_t>::min(); }},
    {status::cache_page, [](call& c) { c.pages[2] = 4; }},
    {status::cache_page, [](call& c) { c.references[3] = -1; }},
    {status::cache_page, [](call& c) { c.args.cache.pages = 6; }},
    {status::out_overlaps_cache, [](call& c) { c.args.cache.keys.data = c.out.data(); }},
    {status::out_overlaps_cache, [](call& c) { c.args.cache.values.data = c.out.data() + 159; }},
    {status::out_overlaps_parameter,
     [](call& c) {
       std::memcpy(c.out.data(), c.pages.data(), 36), c.touched = true;
       c.args.cache.table = reinterpret_cast<std::int32_t*>(c.out.data());
     }},
    {status::out_overlaps_parameter,
     [](call& c) {
       std::memcpy(c.out.data(), c.references.data(), 32), c.touched = true;
       c.args.cache.references = reinterpret_cast<std::int32_t*>(c.out.data());
     }},
    {status::out_overlaps_parameter,
     [](call& c) {
       std::memcpy(c.out.data(), c.lengths.data(), 24), c.touched = true;
       c.args.cache.lengths = reinterpret_cast<index_t*>(c.out.data());
     }},
    {status::out_overlaps_parameter,
     [](call& c) {
       std::memcpy(c.out.data(), c.begins.data(), 24), c.touched = true;
       c.args.cache.begins = reinterpret_cast<index_t*>(c.out.data());
     }},
    {status::out_overlaps_parameter,
     [](call& c) {
       std::memcpy(c.out.data(), c.sequences.data(), 16), c.touched = true;
       c.args.sequences = reinterpret_cast<index_t*>(c.out.data());
     }},
    {status::lse_overlap, [](call& c) { c.args.lse1.data = c.pool_k.data() + 191; }},
    {status::lse_overlap, [](call& c) { c.args.lse2.data = c.pool_v.data(); }},
    {status::lse_overlap, [](call& c) { c.args.cache.keys.data = c.lse1.data(); }},
    {status::raw_out_overlap, [](call& c) { c.args.out1.data = c.pool_v.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.pool_k.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.pool_v.data() + 127; }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.pages.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.references.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.lengths.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.begins.data(); }},
    {status::workspace_overlap, [](call& c) { c.workspace.data = c.sequences.data(); }},
};

constexpr int statuses = static_cast<int>(status::layer_keys) + 1;

/// Statuses of the caches themselves, of rotations, of merging and of layers; their tests are elsewhere.
bool is_of_another_call(status s) {
  if (s >= status::layer_width && s <= status::layer_keys) return true;
  switch (s) {
    case status::rope_table:
    case status::rope_width:
    case status::rope_position:
    case status::cache_config:
    case status::cache_memory:
    case status::cache_not_open:
    case status::cache_key_shape:
    case status::cache_value_shape:
    case status::cache_full:
    case status::cache_no_page:
    case status::cache_overlap:
    case status::cache_length:
    case status::cache_fork:
    case status::merge_parts:
    case status::merge_part_shape: return true;
    default: return false;
  }
}

/// What the arguments alone tell is told by check already, and then no workspace size is given.
void expect_status(call& c, status expected) {
  const status s = c.run();
  EXPECT_EQ(s, expected) << "got: " << message(s);
  if (s == status::ok || (s >= status::executor_workers && s <= status::workspace_overlap)) {
    EXPECT_EQ(test::check(c.args), status::ok);
  } else {
    EXPECT_EQ(test::check(c.args), s);
    EXPECT_EQ(test::workspace_bytes(c.args), 0u);
  }
}

TEST(Check, EveryMisuseHasItsStatus) {
  std::set<status> seen;
  int number = 0;
  for (const misuse& m : misuses)
    for (const schedule_choice schedule : {schedule_choice::automatic, schedule_choice::panels, schedule_choice::stream}) {
      SCOPED_TRACE("misuse " + std::to_string(number++ / 3) + ", expected: " + message(m.expected));
      call c;
      c.args.schedule = schedule;
      m.make(c);
      expect_status(c, m.expected);
      seen.insert(m.expected);
    }
  number = 0;
  for (const misuse& m : cache_misuses)
    for (const schedule_choice schedule : {schedule_choice::automatic, schedule_choice::panels, schedule_choice::stream}) {
      SCOPED_TRACE("misuse " + std::to_string(number++ / 3) + " with a cache, expected: " + message(m.expected));
      call c;
      c.use_cache(), c.args.schedule = schedule;
      m.make(c);
      const std::vector<float> pool_k = c.pool_k, pool_v = c.pool_v;
      expect_status(c, m.expected);
      EXPECT_TRUE(c.pool_k == pool_k && c.pool_v == pool_v);
      seen.insert(m.expected);
    }
  for (int i = 0; i < statuses; ++i)
    EXPECT_TRUE(seen.count(static_cast<status>(i)) || is_of_another_call(static_cast<status>(i)))
        << "no test for: " << message(static_cast<status>(i));
}

// Whatever the fields of a view are, as long as its arrays are as long as it says.
TEST(Check, GarbageViews) {
  test::random_source random(77);
  const index_t least = std::numeric_limits<index_t>::min(), most = std::numeric_limits<index_t>::max();
  std::set<status> seen;
  for (int sample = 0; sample < 10'000; ++sample) {
    call c;
    c.use_cache();
    kv_view& view = c.args.cache;
    const auto any = [&] {
      return random.pick<index_t>(
          {0, 1, -1, 2, 3, 4, 12, -96, huge, -huge, index_t{1} << 60, least, least + 1, most, most / 2});
    };
    for (int i = 0; i < 3; ++i) {
      kv_rows& rows = random.coin() ? view.keys : view.values;
      switch (random.integer(0, 16)) {
        case 0: rows.data = nullptr; break;
        case 1: rows.type = static_cast<storage>(random.integer(-2, 7)); break;
        case 2: rows.heads = any(); break;
        case 3: rows.width = any(); break;
        case 4: rows.page_stride = any(); break;
        case 5: rows.head_stride = any(); break;
        case 6: rows.token_stride = any(); break;
        case 7: view.heads.heads = any(); break;
        case 8: view.heads.kv = any(), view.heads.ratio = any(); break;
        case 9: view.sequences = random.pick<index_t>({least, -1, 0, 1, 2, most, huge}); break;
        case 10: view.page_tokens = any(); break;
        case 11: view.pages = any(), view.references = nullptr; break;
        case 12: view.table_pages = random.pick<index_t>({least, -1, 0, 1, 2, most, huge}); break;
        case 13: random.coin() ? view.table = nullptr : view.references = nullptr; break;
        case 14: c.lengths[static_cast<std::size_t>(random.integer(0, 2))] = any(); break;
        case 15: c.begins[static_cast<std::size_t>(random.integer(0, 2))] = any(); break;
        default: c.sequences[static_cast<std::size_t>(random.integer(0, 1))] = any(); break;
      }
    }
    if (random.integer(0, 9) == 0) view.lengths = view.begins = nullptr;
    if (random.integer(0, 9) == 0) c.args.sequences = nullptr;
    if (random.integer(0, 3) == 0) c.args.mask.key_ranges = nullptr, c.args.mask.causal = true, c.args.mask.window = 2;
    if (random.integer(0, 9) == 0) c.pages[static_cast<std::size_t>(random.integer(0, 8))] = static_cast<std::int32_t>(any());
    const status s = test::check(c.args);
    seen.insert(s);
    EXPECT_EQ(s != status::ok && test::workspace_bytes(c.args) > 0, false);
  }
  EXPECT_GE(seen.size(), 12u);
}

TEST(Check, MessagesNameTheArgument) {
  std::set<std::string> seen;
  for (int i = 0; i < statuses; ++i) {
    const std::string text = message(static_cast<status>(i));
    EXPECT_TRUE(seen.insert(text).second) << "twice: " << text;
    if (i == 0) continue;
    static const char* const arguments[] = {
        "q: ",     "k: ",      "v: ",    "out: ",  "heads: ",     "lambda: ",   "alpha: ",     "scale: ",
        "norm.",   "mask.",    "logits", "lse: ",  "out1/out2: ", "executor: ", "workspace: ", "rope: ",
        "cache: ", "append: ", "fork: ", "k, v: ", "schedule: ",  "merge: ",    "layer: "};
    bool names = false;
    for (const char* const a : arguments) names |= text.rfind(a, 0) == 0 && text.size() > std::strlen(a) + 5;
    EXPECT_TRUE(names) << text;
  }
  EXPECT_STREQ(message(static_cast<status>(statuses)), "unknown status");
}

TEST(Check, WorkspaceSizesNeverWrap) {
  call c;
  for (const index_t workers : {index_t{0}, index_t{-1}, std::numeric_limits<index_t>::max()})
    EXPECT_EQ(test::workspace_bytes(c.args, workers), 0u);
  // Keys of stride 0 may be astronomically many; more workers never need less.
  c.args.k.tokens = c.args.v.tokens = index_t{1} << 46, c.args.mask.key_ranges = nullptr;
  c.args.k.token_stride = c.args.v.token_stride = 0;
  for (const schedule_choice schedule : {schedule_choice::stream, schedule_choice::panels}) {
    c.args.schedule = schedule;
    std::size_t last = 0;
    for (index_t workers = 1; workers <= index_t{1} << 20; workers *= 2) {
      const std::size_t bytes = test::workspace_bytes(c.args, workers);
      EXPECT_GE(bytes, last);
      last = bytes;
    }
    c.workers = index_t{1} << 20;
    // Streams need memory for units, however many workers there are.
    EXPECT_EQ(c.run(), schedule == schedule_choice::stream ? status::workspace_too_small : status::workspace_overflow);
  }
}

TEST(Check, DoesNotWalkThroughAbsurdHeads) {
  call c;
  c.args.q.batch = c.args.k.batch = c.args.v.batch = c.args.out.batch = 0;
  c.args.heads = head_map::interleaved(index_t{1} << 53, 1), c.args.out.heads = index_t{1} << 53;
  c.args.out.head_stride = 0;
  EXPECT_EQ(test::check(c.args), status::heads_missing);
}

TEST(Check, StridesOfAnEmptyBatchAreNotUsed) {
  call c;
  c.args.q.batch = c.args.k.batch = c.args.v.batch = c.args.out.batch = c.args.out1.batch = c.args.out2.batch = 0;
  for (const index_t stride : {index_t{0}, std::numeric_limits<index_t>::max(), std::numeric_limits<index_t>::min()}) {
    c.args.q.batch_stride = c.args.k.batch_stride = c.args.v.batch_stride = c.args.out.batch_stride = stride;
    c.args.out1.batch_stride = c.args.out2.batch_stride = c.args.lse1.batch_stride = c.args.lse2.batch_stride = stride;
    EXPECT_EQ(c.run(), status::ok) << stride;
  }
}

TEST(Check, NoTwoOfNoElementsShareAnAddress) {
  call c;
  c.args.q.tokens = c.args.out.tokens = c.args.out1.tokens = c.args.out2.tokens = 0;
  // As contiguous views of tensors without tokens are: the entries lie 0 apart.
  c.args.q.batch_stride = c.args.out.batch_stride = c.args.out1.batch_stride = c.args.out2.batch_stride = 0;
  c.args.lse1.batch_stride = c.args.lse2.batch_stride = 0;
  EXPECT_EQ(c.run(), status::ok);
}

TEST(Check, BlocksOfAnEmptyBatchAreNotRead) {
  call c;
  c.use_rules(), c.use_second_rules();
  c.args.q.batch = c.args.k.batch = c.args.v.batch = c.args.out.batch = c.args.out1.batch = c.args.out2.batch = 0;
  EXPECT_EQ(c.run(), status::ok);
}

/// Batches that contradict each other are refused before an array is read that is as long as one of them.
TEST(Check, ArraysAreReadOnlyAsFarAsTheBatchesAgree) {
  const auto none_sees = [](call& c) {
    c.args.q.batch = index_t{1} << 40, c.args.q.batch_stride = 0;
    EXPECT_EQ(c.run(), status::out_batch);
  };
  call tensors, cache, packed;
  none_sees(tensors);
  cache.use_cache(), none_sees(cache);
  packed.use_prefixes(), none_sees(packed);
}

TEST(Check, ThrowIfError) {
  EXPECT_NO_THROW(diffattn::throw_if_error(status::ok));
  try {
    diffattn::throw_if_error(status::k_width);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), message(status::k_width));
  }
}

TEST(Check, WhatIsFine) {
  const auto expect_ok = [](void (*make)(call&)) {
    call c;
    make(c);
    const status s = c.run();
    EXPECT_EQ(s, status::ok) << message(s);
  };
  expect_ok([](call& c) { c.use_table(); });
  expect_ok([](call& c) { c.use_table(), c.args.q.heads = 8, c.table[3].query_1 = 0; });  // a table may leave heads unused
  expect_ok([](call& c) { c.args.out1 = {}, c.args.lse2 = {}; });
  expect_ok([](call& c) { c.args.lambda = -3.0f, c.args.alpha = 0.0f, c.args.scale = -1.0f, c.args.norm.eps = 0; });
  expect_ok([](call& c) { c.args.norm.kind = diffattn::norm_kind::group, c.args.norm.bias = c.vector.data(); });
  expect_ok([](call& c) { c.args.mask.causal = true, c.args.mask.offset = -(index_t{1} << 62); });
  expect_ok([](call& c) { c.ranges[0] = c.ranges[1] = {6, 6}; });
  expect_ok([](call& c) { c.use_prefixes(), c.prefixes = {0, 6}, c.args.mask.prefixes = c.prefixes.data(); });
  expect_ok([](call& c) { c.use_packed(); });
  expect_ok([](call& c) { c.use_packed(), c.use_prefixes(); });
  expect_ok([](call& c) {
    c.use_packed(), c.query_starts[1] = 0, c.key_starts = {2, 2, 2}, c.args.mask.key_starts = c.key_starts.data();
  });
  expect_ok([](call& c) { c.use_rules(); });
  expect_ok([](call& c) { c.use_rules(), c.use_second_rules(), c.use_prefixes(); });
  expect_ok([](call& c) { c.use_rules(), c.use_packed(); });
  expect_ok([](call& c) {  // strides that are not used need not make sense
    c.args.logits.bias.key_stride = c.args.logits.visible.batch_stride = c.args.logits.blocks.head_stride = huge;
  });
  expect_ok([](call& c) {  // no blocks, no list
    c.use_rules(), c.block_begins.assign(4, 0), c.args.logits.blocks.keys = nullptr;
  });
  expect_ok([](call& c) {
    c.args.q.data = c.args.k.data = c.args.v.data = c.vector.data(), c.args.q.batch_stride = c.args.q.token_stride = 0,
    c.args.k.batch_stride = c.args.k.token_stride = 0, c.args.v.batch_stride = c.args.v.token_stride = 0;
  });
  // The columns of one row: q, then out, as engines keep them.
  expect_ok([](call& c) {
    c.q.assign(2 * 5 * 40, 1.0f);
    c.out.assign(1, sentinel);
    c.args.q = {c.q.data(), 2, 5, 8, 3, 200, 40, 3, 1};
    c.args.out = {c.q.data() + 24, 2, 5, 4, 4, 200, 40, 4, 1};
  });
  // Slots of one batch entry: q, then out.
  expect_ok([](call& c) {
    c.q.assign(2 * 200, 1.0f);
    c.out.assign(1, sentinel);
    c.args.q = {c.q.data(), 2, 5, 8, 3, 200, 3, 15, 1};
    c.args.out = {c.q.data() + 120, 2, 5, 4, 4, 200, 4, 20, 1};
  });
  // An empty call needs no array.
  expect_ok([](call& c) {
    c.args.q.batch = c.args.k.batch = c.args.v.batch = c.args.out.batch = c.args.out1.batch = c.args.out2.batch = 0;
    c.args.lambda = diffattn::lambda_view<float>::per_head(nullptr);
  });
  // No elements, no data.
  expect_ok([](call& c) {
    c.args.q.tokens = c.args.out.tokens = c.args.out1.tokens = c.args.out2.tokens = 0;
    c.args.q.data = nullptr, c.args.out.data = nullptr, c.workspace = {};
  });
  expect_ok([](call& c) {
    c.args.k.tokens = c.args.v.tokens = 0, c.args.k.data = c.args.v.data = nullptr;
    c.ranges[0] = c.ranges[1] = {0, 0};
  });
}

TEST(Check, WhatIsFineInACache) {
  const auto expect_ok = [](void (*make)(call&)) {
    for (const schedule_choice schedule : {schedule_choice::panels, schedule_choice::stream}) {
      call c;
      c.use_cache(), c.args.schedule = schedule;
      make(c);
      const status s = c.run();
      EXPECT_EQ(s, status::ok) << message(s);
    }
  };
  expect_ok([](call& c) { c.args.cache.heads = {}; });
  // The same heads in other words, or elsewhere.
  expect_ok([](call& c) { c.args.cache.heads = head_map::table(c.table.data(), 4); });
  expect_ok([](call& c) { c.use_table(); });
  expect_ok([](call& c) {
    static std::vector<head_indices> copy;
    copy = c.table, c.use_table(), c.args.cache.heads = head_map::table(copy.data(), 4);
  });
  expect_ok([](call& c) { c.sequences = {1, 1}, c.ranges[0] = {1, 4}, c.args.sequences = c.sequences.data(); });
  expect_ok([](call& c) { c.args.cache.begins = nullptr, c.args.cache.references = nullptr; });
  // Pages that no query looks at may be missing, free or discarded.
  expect_ok([](call& c) { c.pages[0] = -1, c.pages[2] = 99, c.begins[0] = 2, c.ranges[0] = {2, 4}; });
  expect_ok([](call& c) { c.pages[0] = 4, c.ranges[0] = {3, 3}, c.begins[0] = 5; });
  expect_ok([](call& c) { c.use_ring(), c.args.mask.causal = true, c.args.mask.window = 2; });
  expect_ok([](call& c) { c.use_ring(), c.args.mask.causal = true, c.args.mask.window = 2, c.args.cache.begins = nullptr; });
  // A cache without lengths is full.
  expect_ok([](call& c) { c.use_ring(), c.args.cache.lengths = nullptr, c.args.cache.begins = nullptr; });
  // Nothing to do: the cache may be empty, and its pages need not exist.
  expect_ok([](call& c) {
    c.lengths = {0, 0, 0}, c.args.mask.key_ranges = nullptr, c.args.cache.lengths = c.lengths.data();
    c.args.cache.pages = 0, c.args.cache.keys.data = c.args.cache.values.data = nullptr;
  });
  expect_ok([](call& c) {
    c.pages.assign(9, -1), c.args.q.tokens = c.args.out.tokens = c.args.out1.tokens = c.args.out2.tokens = 0;
    c.args.cache.table = c.pages.data();
  });
  expect_ok([](call& c) { c.args.q.batch = c.args.out.batch = c.args.out1.batch = c.args.out2.batch = 0; });
  expect_ok([](call& c) {  // an empty vector's data() may be null
    c.args.q.batch = c.args.out.batch = c.args.out1.batch = c.args.out2.batch = 0, c.args.sequences = nullptr;
  });
}

TEST(Check, StorageBelongsToTheComputingType) {
  std::vector<double> data(64), out(64);
  diffattn::forward_args<double> a;
  a.q = diffattn::view<const double>(data.data(), 1, 1, 2, 4), a.out = diffattn::view(out.data(), 1, 1, 1, 4);
  a.heads = head_map::interleaved(1, 1), a.lambda = 0.5;
  a.cache.keys = {data.data(), storage::f64, 2, 4, 64, 32, 64}, a.cache.values = {data.data(), storage::f64, 1, 4, 32, 32, 32};
  a.cache.sequences = a.cache.pages = a.cache.page_tokens = 1;
  EXPECT_EQ(test::check(a), status::ok);
  for (const storage type : {storage::f32, storage::f16, storage::bf16, storage::int8, storage::q6}) {
    diffattn::forward_args<double> wrong = a;
    wrong.cache.keys.type = type;
    EXPECT_EQ(test::check(wrong), status::cache_storage);
    wrong = a, wrong.cache.values.type = type;
    EXPECT_EQ(test::check(wrong), status::cache_storage);
  }
  diffattn::forward_args<diffattn::bf16> half;
  std::vector<diffattn::bf16> q(8), half_out(4);
  half.q = diffattn::view<const diffattn::bf16>(q.data(), 1, 1, 2, 4), half.out = diffattn::view(half_out.data(), 1, 1, 1, 4);
  half.heads = a.heads, half.lambda = 0.5f, half.cache = a.cache;
  EXPECT_EQ(test::check(half), status::cache_storage);
  for (const storage type : {storage::f32, storage::f16, storage::bf16, storage::int8, storage::q6}) {
    half.cache.keys.type = half.cache.values.type = type;
    EXPECT_EQ(test::check(half), status::ok);
    EXPECT_EQ(test::run(half), status::ok);
  }
}

TEST(Check, WorkspaceOfAnyAlignmentAndExactSize) {
  for (const schedule_choice schedule : {schedule_choice::panels, schedule_choice::stream})
    for (const bool cached : {false, true})
      for (const index_t workers : {index_t{1}, index_t{3}}) {
        call c;
        if (cached) c.use_cache();
        c.args.schedule = schedule;
        c.workers = workers;
        const std::size_t bytes = test::workspace_bytes(c.args, workers);
        ASSERT_GT(bytes, 0u);
        ASSERT_EQ(c.run(), status::ok);
        const std::vector<float> expected = c.out;
        for (std::size_t shift = 0; shift < 70; ++shift) {
          std::vector<unsigned char> memory(bytes + 200, 0xab);
          c.out.assign(c.out.size(), sentinel);
          c.workspace = {memory.data() + shift, bytes};
          ASSERT_EQ(c.run(), status::ok);
          EXPECT_EQ(c.out, expected);
          for (std::size_t i = 0; i < memory.size(); ++i) {
            if (i >= shift && i < shift + bytes) continue;
            ASSERT_EQ(memory[i], 0xab) << "byte " << i << ", shift " << shift;
          }
        }
      }
}

}  // namespace
