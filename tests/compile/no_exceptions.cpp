// SPDX-License-Identifier: MIT
// Compiled with -fno-exceptions -fno-rtti.

#include <diffattn/attention.hpp>
#include <diffattn/diffattn.hpp>

int main() {
  const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  float out[4] = {};
  diffattn::forward_args<float> a;
  a.q = a.k = diffattn::view(ones, 1, 1, 2, 4);
  a.v = diffattn::view(ones, 1, 1, 1, 4), a.out = diffattn::view(out, 1, 1, 1, 4);
  a.heads = diffattn::head_map::interleaved(1, 1);
  a.lambda = 0.25f;
  alignas(64) static unsigned char memory[1 << 20];
  const diffattn::status s = diffattn::forward(a, {memory, sizeof memory});
  return s == diffattn::status::ok && out[0] > 0.9f && out[0] < 1.1f ? 0 : 1;
}
