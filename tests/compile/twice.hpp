// SPDX-License-Identifier: MIT
#pragma once

// Included by two files of one program, whose symbols must not clash.

#include <diffattn/diffattn.hpp>
#include <diffattn/diffattn.hpp>  // NOLINT: on purpose

inline diffattn::forward_args<float> one_token(const float* ones, float* out) {
  diffattn::forward_args<float> a;
  a.q = a.k = diffattn::view(ones, 1, 1, 2, 4);
  a.v = diffattn::view(ones, 1, 1, 1, 4), a.out = diffattn::view(out, 1, 1, 1, 4);
  a.heads = diffattn::head_map::interleaved(1, 1);
  a.lambda = 0.25f;
  a.norm = diffattn::head_norm<float>::none();
  return a;
}

float second_file(const float* ones);
