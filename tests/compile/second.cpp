// SPDX-License-Identifier: MIT
#include "twice.hpp"

float second_file(const float* ones) {
  float out[4] = {};
  diffattn::forward(one_token(ones, out));
  return out[3];
}
