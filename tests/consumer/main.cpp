// SPDX-License-Identifier: MIT

// A user's program: the first query sees one key, so that its output is known.

#include <cmath>
#include <cstdio>
#include <diffattn/diffattn.hpp>

int main() {
  using tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;
  tensor q(1, 9, 4, 8), k(1, 9, 4, 8), v(1, 9, 2, 16), out(1, 9, 2, 16);
  q.setRandom(), k.setRandom(), v.setRandom(), out.setZero();

  diffattn::forward_args<float> args;
  args.q = diffattn::view(q), args.k = diffattn::view(k), args.v = diffattn::view(v), args.out = diffattn::view(out);
  args.heads = diffattn::head_map::interleaved(2, 2);
  args.lambda = 0.25f;
  args.norm = diffattn::head_norm<float>::none();
  args.mask.causal = true;
  diffattn::forward(args);

  for (int h = 0; h < 2; ++h)
    for (int c = 0; c < 16; ++c)
      if (!(std::abs(out(0, 0, h, c) - 0.75f * v(0, 0, h, c)) < 1e-5f)) {
        std::printf("head %d, channel %d: %g instead of %g\n", h, c, static_cast<double>(out(0, 0, h, c)),
                    static_cast<double>(0.75f * v(0, 0, h, c)));
        return 1;
      }
  std::printf("consumer of diffattn %d.%d.%d: ok\n", DIFFATTN_VERSION_MAJOR, DIFFATTN_VERSION_MINOR, DIFFATTN_VERSION_PATCH);
  return 0;
}
