// SPDX-License-Identifier: MIT
// Compiled once for each instruction set, with DIFFATTN_TEST_ISA naming it. No Eigen here: its inline functions would be
// merged.

#include "call.hpp"

#include <diffattn/forward.hpp>

#define DIFFATTN_TEST_JOIN_(a, b) a##b
#define DIFFATTN_TEST_JOIN(a, b) DIFFATTN_TEST_JOIN_(a, b)
#define DIFFATTN_TEST_STRING_(a) #a
#define DIFFATTN_TEST_STRING(a) DIFFATTN_TEST_STRING_(a)

namespace isa_test {

int DIFFATTN_TEST_JOIN(forward_, DIFFATTN_TEST_ISA)(const call& c) {
  diffattn::forward_args<float> a;
  a.q = diffattn::view(c.q, 1, c.tokens, 4, c.d), a.k = diffattn::view(c.k, 1, c.tokens, 4, c.d);
  a.v = diffattn::view(c.v, 1, c.tokens, 2, c.dv), a.out = diffattn::view(c.out, 1, c.tokens, 2, c.dv);
  a.heads = diffattn::head_map::interleaved(2, 2);
  a.lambda = 0.6f;
  a.mask.causal = true;
  const diffattn::owned_workspace scratch(diffattn::workspace_bytes(a));
  return static_cast<int>(diffattn::forward(a, scratch.view()));
}

const char* DIFFATTN_TEST_JOIN(name_, DIFFATTN_TEST_ISA)() {
  return DIFFATTN_TEST_STRING(DIFFATTN_ISA);
}

}  // namespace isa_test
