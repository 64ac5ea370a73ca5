// SPDX-License-Identifier: MIT

// Standard attention from the same kernels, with four query heads to a key head and a sliding window. Differential attention
// with λ = 0 and no norm is exactly that.

#include <cstdio>
#include <cstring>
#include <diffattn/diffattn.hpp>

int main() {
  using tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;   // [batch, tokens, heads, width]
  using per_row = Eigen::Tensor<float, 3, Eigen::RowMajor>;  // [batch, tokens, heads]
  const int n = 300, heads = 8, kv_heads = 2, width = 64;
  tensor q(1, n, heads, width), k(1, n, kv_heads, width), v(1, n, kv_heads, width), out(1, n, heads, width);
  per_row lse(1, n, heads);
  q.setRandom(), k.setRandom(), v.setRandom();

  diffattn::attention_args<float> args;
  args.q = diffattn::view(q), args.k = diffattn::view(k), args.v = diffattn::view(v), args.out = diffattn::view(out);
  args.mask.causal = true;
  args.mask.window = 100;
  args.lse = {lse.data(), n * heads, heads, 1};  // optional: strides of batch, token, head
  diffattn::attention(args);
  std::printf("last row of head 0: %.4f %.4f ..., log-sum-exp %.4f\n", static_cast<double>(out(0, n - 1, 0, 0)),
              static_cast<double>(out(0, n - 1, 0, 1)), static_cast<double>(lse(0, n - 1, 0)));

  // Each query head once as the first map and once as the second.
  diffattn::head_indices pairs[heads];
  for (int h = 0; h < heads; ++h) pairs[h] = {h, heads - 1 - h, h / 4, h / 4, h / 4, -1};
  tensor difference(1, n, heads, width);
  diffattn::forward_args<float> both;
  both.q = args.q, both.k = args.k, both.v = args.v, both.out = diffattn::view(difference);
  both.heads = diffattn::head_map::table(pairs, heads);
  both.lambda = 0.0f;
  both.norm = diffattn::head_norm<float>::none();
  both.mask = args.mask;
  diffattn::forward(both);

  const bool same = std::memcmp(out.data(), difference.data(), static_cast<std::size_t>(out.size()) * sizeof(float)) == 0;
  std::printf("differential attention with lambda = 0 is standard attention bit for bit: %s\n", same ? "yes" : "no");
  return same ? 0 : 1;
}
