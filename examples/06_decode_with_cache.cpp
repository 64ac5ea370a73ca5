// SPDX-License-Identifier: MIT

// One token at a time: a cache keeps what was seen, a step reads each of its bytes once. Checked against all tokens in one call
// without a cache.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <diffattn/diffattn.hpp>
#include <vector>

namespace {

using tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;  // [batch, tokens, heads, width]
using diffattn::throw_if_error;

constexpr int prompt = 100, total = 108, heads = 8, kv_pairs = 2, width = 64;

bool decode(const char* name, diffattn::storage type, double tolerance) {
  tensor q(1, total, 2 * heads, width), k(1, total, 2 * kv_pairs, width), v(1, total, kv_pairs, 2 * width);
  tensor out(1, total, heads, 2 * width), expected(1, total, heads, 2 * width);
  q.setRandom(), k.setRandom(), v.setRandom();

  // Rotations of every position that may come.
  std::vector<float> cos(total * width / 2), sin(total * width / 2);
  diffattn::rope_config rule;
  rule.width = width, rule.base = 10000;
  throw_if_error(fill_rope_table(rule, 0, total, cos.data(), sin.data()));
  const diffattn::rope_view rope{cos.data(), sin.data(), total, width, diffattn::rope_style::interleaved};

  // An empty cache in memory of our own.
  diffattn::kv_cache_config config;
  config.heads = diffattn::head_map::interleaved(heads, kv_pairs);
  config.key_width = width, config.value_width = 2 * width;
  config.keys = config.values = type;
  config.capacity = total;
  const diffattn::owned_workspace memory(kv_cache_bytes(config));
  diffattn::kv_cache cache;
  throw_if_error(cache.open(config, memory.view()));
  std::vector<unsigned char> scratch;

  diffattn::forward_args<float> args;
  args.heads = config.heads;
  args.lambda = 0.36f;
  args.mask.causal = true;  // the last query is the last token of the cache

  const auto step = [&](int first, int count) {  // in a model: one layer
    const auto queries = diffattn::view(q).token_range(first, count);
    throw_if_error(rotate(rope, queries, queries, first));
    args.q = queries, args.out = diffattn::view(out).token_range(first, count);
    throw_if_error(
        cache.append(0, diffattn::view(k).token_range(first, count), diffattn::view(v).token_range(first, count), rope));
    args.cache = cache.view();
    scratch.resize(std::max(scratch.size(), workspace_bytes(args, 1, total)));  // grows no more after the first token
    throw_if_error(forward(args, {scratch.data(), scratch.size()}));
  };
  step(0, prompt);
  for (int token = prompt; token < total; ++token) step(token, 1);

  // The same without a cache; q has been rotated by now.
  throw_if_error(rotate(rope, diffattn::view(k), diffattn::view(k)));
  args.cache = {};
  args.q = diffattn::view(q), args.k = diffattn::view(k), args.v = diffattn::view(v), args.out = diffattn::view(expected);
  diffattn::forward(args);
  double worst = 0;
  bool good = true;
  for (Eigen::Index i = 0; i < out.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(out.data()[i]) - static_cast<double>(expected.data()[i]));
    worst = std::fmax(worst, difference), good &= difference <= tolerance;  // false for NaN
  }
  std::printf("%s: %d tokens in %zu bytes; largest difference from one call without a cache %.1e\n", name, total,
              memory.view().bytes, worst);
  return good;
}

}  // namespace

int main() {
  const bool ok[] = {decode("f32", diffattn::storage::f32, 1e-5), decode("bf16", diffattn::storage::bf16, 2e-2),
                     decode("int8", diffattn::storage::int8, 3e-2)};
  return ok[0] && ok[1] && ok[2] ? 0 : 1;
}
