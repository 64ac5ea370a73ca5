// SPDX-License-Identifier: MIT

// A whole attention layer of a published family: its file in models/ says which heads belong together, what λ is made of, which
// norm follows; the layer projects, rotates, keeps a cache and projects back. A prompt and single tokens through a cache,
// checked against all tokens in one call.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <diffattn/diffattn.hpp>
#include <vector>

namespace {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;  // a token in each row
using diffattn::throw_if_error;

constexpr int prompt = 60, total = 64, model_width = 256, heads = 8, kv_heads = 4, width = 32;

bool run(const char* name, const diffattn::layer_config& config) {
  // The layer's numbers, as a checkpoint has them: [outputs, inputs].
  const matrix wq = matrix::Random(heads * width, model_width) / 16, wk = matrix::Random(kv_heads * width, model_width) / 16;
  const matrix wv = matrix::Random(kv_heads * width, model_width) / 16, wo = matrix::Random(model_width, heads * width) / 16;
  const matrix lambda = matrix::Random(4, width) / 4, norm = matrix::Ones(1, 2 * width);

  diffattn::layer_args<float> args;
  args.config = config;
  args.weights.q.weight = wq.data(), args.weights.k.weight = wk.data(), args.weights.v.weight = wv.data();
  args.weights.out.weight = wo.data();
  args.weights.lambda_q1 = lambda.row(0).data(), args.weights.lambda_k1 = lambda.row(1).data();
  args.weights.lambda_q2 = lambda.row(2).data(), args.weights.lambda_k2 = lambda.row(3).data();
  if (config.norm_weight) args.weights.norm = norm.data();

  std::vector<float> cos(total * width / 2), sin(total * width / 2);
  diffattn::rope_config rule;
  rule.width = width;
  throw_if_error(fill_rope_table(rule, 0, total, cos.data(), sin.data()));
  if (config.rotates) args.rope = {cos.data(), sin.data(), total, width, config.rope};

  const matrix x = matrix::Random(total, model_width);
  matrix all(total, model_width), stepwise(total, model_width);
  args.x = diffattn::view(x, 1), args.out = diffattn::view(all, 1);
  diffattn::forward(args);

  diffattn::kv_cache_config cached = to_cache_config(config);
  cached.capacity = total;
  const diffattn::owned_workspace memory(kv_cache_bytes(cached));
  diffattn::kv_cache cache;
  throw_if_error(cache.open(cached, memory.view()));
  args.cache = &cache;
  std::vector<unsigned char> scratch;
  for (int first = 0, n = prompt; first < total; first += n, n = 1) {
    args.x = diffattn::view(x, 1).token_range(first, n), args.out = diffattn::view(stepwise, 1).token_range(first, n);
    scratch.resize(std::max(scratch.size(), workspace_bytes(args, 1, total)));
    throw_if_error(forward(args, {scratch.data(), scratch.size()}));
  }

  const float difference = (all - stepwise).cwiseAbs().maxCoeff() / all.cwiseAbs().maxCoeff();
  std::printf("%s: largest difference between one call and single tokens %.1e\n", name, static_cast<double>(difference));
  return difference < 1e-5f;  // false for NaN
}

}  // namespace

int main() {
  diffattn::layer_shape shape;
  shape.model_width = model_width, shape.query_heads = heads, shape.key_heads = kv_heads, shape.head_width = width;
  const bool ok[] = {run("microsoft/unilm V1", diffattn::models::unilm_v1(shape, 3)),
                     run("DiffLlama", diffattn::models::diffllama(shape, 3)),
                     run("Phi-4-mini-flash", diffattn::models::phi4flash(shape, 3, 20)),
                     run("Motif-2.6B", diffattn::models::motif_2p6b(shape, 3))};
  return ok[0] && ok[1] && ok[2] && ok[3] ? 0 : 1;
}
