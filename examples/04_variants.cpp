// SPDX-License-Identifier: MIT

// Three published variants. What differs is the head map, the rule for λ and the norm; the call is the same.

#include <cstdio>
#include <diffattn/diffattn.hpp>

#include "naive.hpp"

namespace {

using tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;

constexpr int n = 65;

bool matches(const char* name, const diffattn::forward_args<float>& args) {
  diffattn::forward(args);
  const double difference = largest_difference(args);
  std::printf("%-34s largest difference from the definition %.1e\n", name, difference);
  return difference < 2e-5;
}

tensor random(int heads, int width) {
  tensor x(1, n, heads, width);
  x.setRandom();
  return x;
}

// Version 2: query pairs share one key and value head, λ is the sigmoid of a logit of each token and head, no norm.
bool version_2() {
  const tensor q = random(8, 64), k = random(2, 64), v = random(2, 64);
  tensor out(1, n, 4, 64);
  Eigen::Tensor<float, 3, Eigen::RowMajor> logits(1, n, 4);  // x · W, [batch, tokens, heads]
  logits.setRandom();
  diffattn::forward_args<float> args;
  args.q = diffattn::view(q), args.k = diffattn::view(k), args.v = diffattn::view(v), args.out = diffattn::view(out);
  args.heads = diffattn::head_map::shared(/*heads=*/4, /*kv_heads=*/2);
  args.lambda = diffattn::lambda_view<float>::gate(logits.data(), /*tokens=*/n, /*heads=*/4);
  args.norm = diffattn::head_norm<float>::none();
  args.mask.causal = true;
  return matches("version 2, gates", args);
}

// Hugging Face DiffLlama: query heads h and h + heads; the value is two distant heads side by side, read where they lie.
bool diff_llama() {
  const tensor q = random(8, 32), k = random(4, 32), v = random(4, 32);
  tensor out(1, n, 4, 64);
  diffattn::forward_args<float> args;
  args.q = diffattn::view(q), args.k = diffattn::view(k), args.v = diffattn::view(v), args.out = diffattn::view(out);
  args.heads = diffattn::head_map::halves(/*heads=*/4, /*kv_heads=*/4);
  args.lambda = 0.71f;
  args.norm.gain = static_cast<float>(1 - diffattn::lambda_init(4));
  args.mask.causal = true;
  return matches("DiffLlama, halves", args);
}

// Grouped differential attention: four signal heads to one noise head, a λ for each head.
bool grouped() {
  const tensor q = random(10, 32), k = random(4, 32), v = random(4, 32);
  tensor out(1, n, 8, 64);
  const float lambda[8] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f};
  diffattn::forward_args<float> args;
  args.q = diffattn::view(q), args.k = diffattn::view(k), args.v = diffattn::view(v), args.out = diffattn::view(out);
  args.heads = diffattn::head_map::grouped(/*heads=*/8, /*signal_per_noise=*/4, /*kv_pairs=*/2);
  args.lambda = diffattn::lambda_view<float>::per_head(lambda);
  args.mask.causal = true;
  return matches("grouped, 4 signal heads to 1 noise", args);
}

}  // namespace

int main() {
  const bool ok[] = {version_2(), diff_llama(), grouped()};
  return ok[0] && ok[1] && ok[2] ? 0 : 1;
}
