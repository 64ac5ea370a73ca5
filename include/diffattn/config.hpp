// SPDX-License-Identifier: MIT
#pragma once

// Version, compiler switches and the two namespaces everything lives in.
//
//   diffattn::v0_1            plain descriptions (views, masks, status) that may cross object files
//   diffattn::v0_1::<isa>     every function whose machine code depends on the compiler's -m flags
//
// Both are inline, so users write `diffattn::forward`. The second one makes two objects of one program that were compiled
// for different processors keep their own copies: without the instruction set in the symbol the linker would merge
// them and could hand AVX-512 code to a processor that lacks it. Functions of the first namespace are inlined for the
// same reason (all of them from -O1 on).

#define DIFFATTN_VERSION_MAJOR 0
#define DIFFATTN_VERSION_MINOR 1
#define DIFFATTN_VERSION_PATCH 0

// The exponential rounds by adding and subtracting a large constant and masked scores are infinite: both are lost under
// these flags, silently. -ffp-contract, -fno-math-errno and -fno-trapping-math are fine.
#if (defined(__FAST_MATH__) && __FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    (defined(__ASSOCIATIVE_MATH__) && __ASSOCIATIVE_MATH__)
#error "diffattn: -ffast-math (finite-math-only, associative-math) breaks masks and NaN; compile this file without it"
#endif

#if defined(__GNUC__)
#define DIFFATTN_INLINE inline __attribute__((always_inline))
#define DIFFATTN_NOINLINE __attribute__((noinline))
#elif defined(_MSC_VER)
#define DIFFATTN_INLINE __forceinline
#define DIFFATTN_NOINLINE __declspec(noinline)
#else
#define DIFFATTN_INLINE inline
#define DIFFATTN_NOINLINE
#endif

// Full unrolling of the register-tile loops must not hang on the optimisation level.
#if defined(__clang__)
#define DIFFATTN_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define DIFFATTN_UNROLL _Pragma("GCC unroll 16")
#else
#define DIFFATTN_UNROLL
#endif

// The instruction-set tag: the widest vector extension, then the flags that change scalar and fused arithmetic.
#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define DIFFATTN_ISA_BASE avx512bw
#elif defined(__AVX512F__)
#define DIFFATTN_ISA_BASE avx512f
#elif defined(__AVX2__)
#define DIFFATTN_ISA_BASE avx2
#elif defined(__AVX__)
#define DIFFATTN_ISA_BASE avx
#elif defined(__SSE4_1__)
#define DIFFATTN_ISA_BASE sse4
#elif defined(__SSE2__) || defined(_M_X64)
#define DIFFATTN_ISA_BASE sse2
#elif defined(__aarch64__)
#define DIFFATTN_ISA_BASE neon64
#else
#define DIFFATTN_ISA_BASE generic
#endif
#if defined(__FMA__)
#define DIFFATTN_ISA_FMA _fma
#else
#define DIFFATTN_ISA_FMA
#endif
#if defined(__BMI2__)
#define DIFFATTN_ISA_BMI _bmi2
#else
#define DIFFATTN_ISA_BMI
#endif
#if defined(__AVX512VBMI2__)
#define DIFFATTN_ISA_VBMI _vbmi2
#else
#define DIFFATTN_ISA_VBMI
#endif
#if defined(__F16C__)
#define DIFFATTN_ISA_F16C _f16c
#else
#define DIFFATTN_ISA_F16C
#endif
#define DIFFATTN_PASTE_(a, b, c, d, e) a##b##c##d##e
#define DIFFATTN_PASTE(a, b, c, d, e) DIFFATTN_PASTE_(a, b, c, d, e)
#define DIFFATTN_ISA DIFFATTN_PASTE(DIFFATTN_ISA_BASE, DIFFATTN_ISA_FMA, DIFFATTN_ISA_BMI, DIFFATTN_ISA_VBMI, DIFFATTN_ISA_F16C)

#define DIFFATTN_NAMESPACE_BEGIN \
  namespace diffattn {           \
  inline namespace v0_1 {
#define DIFFATTN_NAMESPACE_END \
  }                            \
  }
#define DIFFATTN_ISA_NAMESPACE_BEGIN \
  DIFFATTN_NAMESPACE_BEGIN           \
  inline namespace DIFFATTN_ISA {
#define DIFFATTN_ISA_NAMESPACE_END \
  }                                \
  DIFFATTN_NAMESPACE_END
