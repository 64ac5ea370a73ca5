// SPDX-License-Identifier: MIT
// Objects made for different processors in one program: each must run its own code.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "../reference/reference.hpp"
#include "../support/compare.hpp"
#include "../support/random.hpp"
#include "call.hpp"

namespace {

TEST(InstructionSets, EachObjectKeepsItsOwn) {
  const long tokens = 70, d = 9, dv = 11;
  test::random_source random(8);
  const std::vector<float> q = test::normal_vector<float>(tokens * 4 * d, random),
                           k = test::normal_vector<float>(tokens * 4 * d, random),
                           v = test::normal_vector<float>(tokens * 2 * dv, random);
  reference::problem<float> p;
  p.q_len = p.kv_len = tokens, p.d = d, p.dv = dv;
  p.q = {q.data(), 0, 4 * d, d}, p.k = {k.data(), 0, 4 * d, d}, p.v = {v.data(), 0, 2 * dv, dv};
  p.heads = {{{0, 1}, {0, 1}, 0, -1}, {{2, 3}, {2, 3}, 1, -1}};
  p.factor[0].assign(static_cast<std::size_t>(2 * tokens), 1),
      p.factor[1].assign(static_cast<std::size_t>(2 * tokens), double(0.6f));
  p.scale = 1 / std::sqrt(double(d)), p.causal = true, p.kind = reference::norm::rms, p.eps = double(1e-5f);
  const reference::result r = reference::attention(p);
  std::vector<double> tolerance;
  for (const double e : r.out.error) tolerance.push_back(e * double(std::numeric_limits<float>::epsilon()) / 2);

  const auto expect_right = [&](int (*forward)(const isa_test::call&), const char* name) {
    std::vector<float> out(r.out.value.size());
    EXPECT_EQ(forward({q.data(), k.data(), v.data(), out.data(), tokens, d, dv}), 0);
    EXPECT_TRUE(test::compare(out, r.out.value, tolerance, {{{"row", tokens}, {"head", 2}, {"channel", dv}}})) << name;
  };
  expect_right(isa_test::forward_baseline, isa_test::name_baseline());
  EXPECT_EQ(std::string(isa_test::name_baseline()), "sse2");
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP() << "no AVX2 here";
  EXPECT_EQ(std::string(isa_test::name_v3()), "avx2_fma_bmi2_f16c");
  expect_right(isa_test::forward_v3, isa_test::name_v3());
}

}  // namespace
