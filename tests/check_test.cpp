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

namespace {

using diffattn::attention_mask;
using diffattn::head_indices;
using diffattn::head_map;
using diffattn::index_t;
using diffattn::key_range;
using diffattn::status;

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
};

constexpr int statuses = static_cast<int>(status::workspace_overlap) + 1;

TEST(Check, EveryMisuseHasItsStatus) {
  std::set<status> seen;
  int number = 0;
  for (const misuse& m : misuses) {
    SCOPED_TRACE("misuse " + std::to_string(number++) + ", expected: " + message(m.expected));
    call c;
    m.make(c);
    const status s = c.run();
    EXPECT_EQ(s, m.expected) << "got: " << message(s);
    // What the arguments alone tell is told by check already, and then no workspace size is given.
    if (s >= status::executor_workers || s == status::ok) {
      EXPECT_EQ(test::check(c.args), status::ok);
    } else {
      EXPECT_EQ(test::check(c.args), s);
      EXPECT_EQ(test::workspace_bytes(c.args), 0u);
    }
    seen.insert(m.expected);
  }
  for (int i = 0; i < statuses; ++i)
    EXPECT_TRUE(seen.count(static_cast<status>(i))) << "no test for: " << message(static_cast<status>(i));
}

TEST(Check, MessagesNameTheArgument) {
  std::set<std::string> seen;
  for (int i = 0; i < statuses; ++i) {
    const std::string text = message(static_cast<status>(i));
    EXPECT_TRUE(seen.insert(text).second) << "twice: " << text;
    if (i == 0) continue;
    static const char* const arguments[] = {"q: ",     "k: ",   "v: ",   "out: ", "heads: ",     "lambda: ",   "alpha: ",
                                            "scale: ", "norm.", "mask.", "lse: ", "out1/out2: ", "executor: ", "workspace: "};
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
  std::size_t last = 0;
  for (index_t workers = 1; workers <= index_t{1} << 20; workers *= 2) {
    const std::size_t bytes = test::workspace_bytes(c.args, workers);
    EXPECT_GE(bytes, last);
    last = bytes;
  }
  c.workers = index_t{1} << 20;
  EXPECT_EQ(c.run(), status::workspace_overflow);
}

TEST(Check, DoesNotWalkThroughAbsurdHeads) {
  call c;
  c.args.q.batch = c.args.k.batch = c.args.v.batch = c.args.out.batch = 0;
  c.args.heads = head_map::interleaved(index_t{1} << 53, 1), c.args.out.heads = index_t{1} << 53;
  c.args.out.head_stride = 0;
  EXPECT_EQ(test::check(c.args), status::heads_missing);
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
  expect_ok([](call& c) { c.args.mask.offset = std::numeric_limits<index_t>::max(); });  // only read if causal
  expect_ok([](call& c) { c.args.mask.causal = true, c.args.mask.offset = -(index_t{1} << 62); });
  expect_ok([](call& c) { c.ranges[0] = c.ranges[1] = {6, 6}; });
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

TEST(Check, WorkspaceOfAnyAlignmentAndExactSize) {
  for (const index_t workers : {index_t{1}, index_t{3}}) {
    call c;
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
