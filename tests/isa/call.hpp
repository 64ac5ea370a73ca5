// SPDX-License-Identifier: MIT
#pragma once

// One small call, compiled several times for different processors and linked into one program.

namespace isa_test {

struct call {
  const float *q, *k, *v;
  float* out;
  long tokens, d, dv;
};

/// Two causal heads of differential attention; the number of the status.
int forward_baseline(const call& c);
int forward_v3(const call& c);
/// The instruction set of the symbols that the file made, e.g. "avx2_fma_bmi2".
const char* name_baseline();
const char* name_v3();

}  // namespace isa_test
