// SPDX-License-Identifier: MIT
// forward(args, workspace, executor) takes no memory from the heap, nor does a decode step: append and forward.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <diffattn/attention.hpp>
#include <diffattn/kv_cache.hpp>
#if defined(_OPENMP)
#include <diffattn/executor/openmp.hpp>
#endif
#include <vector>

#include "../support/allocations.hpp"

namespace {

#if defined(DIFFATTN_TEST_TRAPS_MALLOC)

using diffattn::index_t;
using diffattn::status;
using test::allocations;
using test::armed;

struct tensors {
  std::vector<float> q, k, v, out, out1, lse;
  diffattn::forward_args<float> args;
  diffattn::attention_args<float> standard;

  tensors()
      : q(2 * 197 * 8 * 16, 0.5f),
        k(2 * 197 * 4 * 16, 0.25f),
        v(2 * 197 * 2 * 24, 1.0f),
        out(2 * 197 * 4 * 24),
        out1(out),
        lse(2 * 197 * 8) {
    args.q = diffattn::view<const float>(q.data(), 2, 197, 8, 16),
    args.k = diffattn::view<const float>(k.data(), 2, 197, 4, 16);
    args.v = diffattn::view<const float>(v.data(), 2, 197, 2, 24), args.out = diffattn::view(out.data(), 2, 197, 4, 24);
    args.out1 = diffattn::view(out1.data(), 2, 197, 4, 24);
    args.lse1 = {lse.data(), 197 * 4, 4, 1};
    args.heads = diffattn::head_map::interleaved(4, 2);
    args.lambda = 0.3f;
    args.mask.causal = true;
    standard.q = args.q, standard.k = args.k, standard.out = diffattn::view(out.data(), 2, 197, 8, 12);
    standard.v = diffattn::view<const float>(v.data(), 2, 197, 4, 12);
  }
};

template <class Executor>
void expect_no_allocation(Executor&& executor) {
  tensors t;
  const std::size_t bytes = std::max(diffattn::workspace_bytes(t.args, executor.workers()),
                                     diffattn::workspace_bytes(t.standard, executor.workers()));
  std::vector<unsigned char> memory(bytes);
  const diffattn::workspace scratch{memory.data(), memory.size()};
  // OpenMP makes its team of threads in the first region.
  ASSERT_EQ(diffattn::forward(t.args, scratch, executor), status::ok);
  ASSERT_EQ(diffattn::attention(t.standard, scratch, executor), status::ok);
  allocations = 0;
  armed = true;
  const status s = diffattn::forward(t.args, scratch, executor);
  const status standard = diffattn::attention(t.standard, scratch, executor);
  const status wrong = diffattn::forward(diffattn::forward_args<float>(), scratch, executor);
  const std::size_t again = diffattn::workspace_bytes(t.args, executor.workers());
  armed = false;
  EXPECT_EQ(s, status::ok);
  EXPECT_EQ(standard, status::ok);
  EXPECT_NE(wrong, status::ok);
  EXPECT_GT(again, 0u);
  EXPECT_EQ(allocations, 0);
}

/// Steps of all kinds of caches and storage types: one token, four to verify, back by three.
template <class Executor>
void expect_no_allocation_in_decoding(Executor&& executor) {
  using diffattn::kv_cache_kind;
  using diffattn::storage;
  tensors t;
  for (const kv_cache_kind kind : {kv_cache_kind::contiguous, kv_cache_kind::ring, kv_cache_kind::paged})
    for (const storage type : {storage::f32, storage::f16, storage::bf16, storage::int8, storage::q6}) {
      diffattn::kv_cache_config config;
      config.heads = t.args.heads, config.key_width = 16, config.value_width = 24, config.keys = config.values = type;
      config.kind = kind, config.sequences = 2, config.capacity = kind == kv_cache_kind::ring ? 100 : 1500;
      std::vector<unsigned char> memory(diffattn::kv_cache_bytes(config)), scratch_memory;
      diffattn::kv_cache cache;
      ASSERT_EQ(cache.open(config, {memory.data(), memory.size()}), status::ok);
      for (int i = 0; i < 6; ++i) ASSERT_EQ(cache.append(t.args.k, t.args.v), status::ok);
      diffattn::forward_args<float> a = t.args;
      a.k = a.v = {}, a.cache = cache.view(), a.mask.window = 80;
      const auto tokens = [](auto view, index_t n) {
        view.tokens = n;
        return view;
      };
      a.q = tokens(a.q, 4), a.out = tokens(a.out, 4), a.out1 = tokens(a.out1, 4);
      scratch_memory.resize(2 * diffattn::workspace_bytes(a, executor.workers()));
      const diffattn::workspace scratch{scratch_memory.data(), scratch_memory.size()};
      ASSERT_EQ(diffattn::forward(a, scratch, executor), status::ok);
      bool all_ok = true;
      allocations = 0;
      armed = true;
      for (int step = 0; step < 20; ++step)
        for (const index_t n : {1, 4}) {
          a.q = tokens(a.q, n), a.out = tokens(a.out, n), a.out1 = tokens(a.out1, n);
          all_ok &= cache.append(tokens(t.args.k, n), tokens(t.args.v, n)) == status::ok;
          all_ok &= diffattn::forward(a, scratch, executor) == status::ok;
          for (index_t s = 0; s < 2 && n == 4; ++s) all_ok &= cache.truncate(s, cache.length(s) - 3) == status::ok;
        }
      armed = false;
      EXPECT_TRUE(all_ok);
      EXPECT_EQ(allocations, 0);
    }
}

TEST(Allocation, TheTrapWorks) {
  allocations = 0;
  armed = true;
  // Through pointers that the compiler cannot see through: it may leave out a pair of new and delete.
  void* (*volatile take)(std::size_t) = std::malloc;
  void* (*volatile take_new)(std::size_t) = [](std::size_t n) { return ::operator new(n); };
  void* const by_malloc = take(4);
  void* const by_new = take_new(4);
  armed = false;
  std::free(by_malloc);
  ::operator delete(by_new);
  EXPECT_GE(allocations, 2);
}

TEST(Allocation, SerialTakesNone) {
  expect_no_allocation(diffattn::serial_executor());
}

TEST(Allocation, DecodingTakesNone) {
  expect_no_allocation_in_decoding(diffattn::serial_executor());
#if defined(_OPENMP)
  expect_no_allocation_in_decoding(diffattn::openmp_executor(2));
#endif
}

#if defined(_OPENMP)
TEST(Allocation, OpenMpTakesNone) {
  for (const int threads : {1, 2}) expect_no_allocation(diffattn::openmp_executor(threads));
}
#endif

TEST(Allocation, ConvenienceCallTakesOne) {
  tensors t;
  allocations = 0;
  armed = true;
  diffattn::forward(t.args);
  armed = false;
  EXPECT_EQ(allocations, 1);
}

#else
TEST(Allocation, TheTrapWorks) {
  GTEST_SKIP() << "malloc cannot be replaced here";
}
#endif

}  // namespace
