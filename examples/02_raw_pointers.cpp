// SPDX-License-Identifier: MIT

// For an engine with buffers of its own: raw pointers, scratch memory made once, a status instead of exceptions, no Eigen.
// The same tensors in both common layouts give the same bits.

#include <cstdio>
#include <cstring>
#include <diffattn/forward.hpp>
#include <vector>

namespace {

using diffattn::index_t;

constexpr index_t batch = 2, tokens = 77, heads = 4, width = 32;  // differential heads; 2 * heads of queries and keys

void fill(diffattn::tensor_view<float> x, unsigned seed) {  // by index, so that the layout does not matter
  for (index_t b = 0; b < x.batch; ++b)
    for (index_t t = 0; t < x.tokens; ++t)
      for (index_t h = 0; h < x.heads; ++h)
        for (index_t c = 0; c < x.width; ++c) {
          seed = seed * 1664525u + 1013904223u;
          x.at(b, t, h)[c] = static_cast<float>(seed >> 8) / 16777216.0f - 0.5f;
        }
}

}  // namespace

int main() {
  const std::size_t size = static_cast<std::size_t>(batch * tokens * 2 * heads * width);
  std::vector<float> q(size), k(size), v(size), out[2] = {std::vector<float>(size), std::vector<float>(size)};
  std::vector<unsigned char> scratch;

  for (const auto order : {diffattn::layout::bthd, diffattn::layout::bhtd}) {
    const auto q_view = diffattn::view(q.data(), batch, tokens, 2 * heads, width, order);
    const auto k_view = diffattn::view(k.data(), batch, tokens, 2 * heads, width, order);
    const auto v_view = diffattn::view(v.data(), batch, tokens, heads, 2 * width, order);
    fill(q_view, 1), fill(k_view, 2), fill(v_view, 3);

    diffattn::forward_args<float> args;
    args.q = q_view, args.k = k_view, args.v = v_view;
    args.out = diffattn::view(out[order == diffattn::layout::bhtd].data(), batch, tokens, heads, 2 * width);
    args.heads = diffattn::head_map::interleaved(heads, heads);
    args.lambda = 0.5f;
    args.mask.causal = true;

    if (scratch.empty()) scratch.resize(diffattn::workspace_bytes(args));
    const diffattn::status s = diffattn::forward(args, {scratch.data(), scratch.size()});
    std::printf("%s: %s, %zu bytes of scratch\n", order == diffattn::layout::bthd ? "[B,T,H,D]" : "[B,H,T,D]",
                diffattn::message(s), scratch.size());
    if (s != diffattn::status::ok) return 1;

    // A mistake is named, and nothing is written.
    args.heads = diffattn::head_map::interleaved(heads + 1, heads + 1);
    const diffattn::status wrong = diffattn::forward(args, {scratch.data(), scratch.size()});
    std::printf("with one head too many: %s\n", diffattn::message(wrong));
    if (wrong == diffattn::status::ok) return 1;
  }
  return std::memcmp(out[0].data(), out[1].data(), size * sizeof(float)) == 0 ? 0 : 1;
}
