// SPDX-License-Identifier: MIT
#pragma once

// What a call is told: one aggregate for differential attention, one for standard attention. Set the fields that matter and
// leave the rest; every field is a run-time value.

#include "heads.hpp"
#include "kv_view.hpp"
#include "lambda.hpp"
#include "logits.hpp"
#include "mask.hpp"
#include "norm.hpp"
#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// In which order a call works. `automatic` chooses by shape; the others are for measurements and tests.
enum class schedule_choice {
  automatic,  ///< stream for at most 8 queries of a sequence (4 in double), else panels
  panels,     ///< prefill: values are packed once, then each block of queries passes over all keys
  stream      ///< decode: every key and value is read once, for all query rows
};

/// Differential attention:
///   out = gain · norm( (α · softmax(q₁k₁ᵀ·scale + mask) − λ · softmax(q₂k₂ᵀ·scale + mask)) · v )
/// for every differential head of `heads` (arXiv 2410.05258, section 2; version 2: norm = head_norm<T>::none()).
///
/// T is float, double, f16 or bf16. The 16-bit types are computed in float and rounded once, when `out` is stored; parameters
/// and optional outputs are float then.
template <class T>
struct forward_args {
  using real = compute_type<T>;

  tensor_view<const T> q;  ///< [batch, q_len, query heads, d]
  tensor_view<const T> k;  ///< [batch, kv_len, key heads, d]
  tensor_view<const T> v;  ///< [batch, kv_len, value heads, dv or dv/2]
  tensor_view<T> out;      ///< [batch, q_len, differential heads, dv]; may not overlap an input
  head_map heads;
  lambda_view<real> lambda;           ///< λ; must be given
  lambda_view<real> alpha = real(1);  ///< factor of the first map
  head_norm<real> norm;
  attention_mask mask;
  logit_rules<real> logits;                     ///< soft cap, ALiBi, bias, further masks and sinks of both maps …
  const logit_rules<real>* logits_2 = nullptr;  ///< … or of the first one, if those of the second are given here
  real scale = real(0);                         ///< factor on q·k; 0 = 1/sqrt(d)

  kv_view cache;                       ///< keys and values in place of k and v, with a length for each sequence
  const index_t* sequences = nullptr;  ///< [batch] sequence of the cache for each batch entry; null: entry b is sequence b

  token_head_view<real> lse1,
      lse2;  ///< optional: natural log of Σ exp(logit) of each map, [batch, q_len, heads]; −∞ without key and sink
  tensor_view<real> out1, out2;  ///< optional: softmax₁·v and softmax₂·v, shaped as out. Each costs one more product with v;
                                 ///< `out` is the same bit for bit
  schedule_choice schedule = schedule_choice::automatic;
};

/// Standard attention, out = softmax(q kᵀ·scale + mask) · v, by the same kernels. Query head h reads key and value head
/// h / (query heads / key heads). T and the cache as above.
template <class T>
struct attention_args {
  using real = compute_type<T>;

  tensor_view<const T> q;  ///< [batch, q_len, query heads, d]
  tensor_view<const T> k;  ///< [batch, kv_len, key heads, d]
  tensor_view<const T> v;  ///< [batch, kv_len, key heads, dv]
  tensor_view<T> out;      ///< [batch, q_len, query heads, dv]
  attention_mask mask;
  logit_rules<real> logits;  ///< soft cap, ALiBi, bias, further masks and sinks
  real scale = real(0);      ///< factor on q·k; 0 = 1/sqrt(d)

  kv_view cache;  ///< keys and values in place of k and v
  const index_t* sequences = nullptr;

  token_head_view<real> lse;  ///< optional: natural log of Σ exp(logit), [batch, q_len, query heads]
  schedule_choice schedule = schedule_choice::automatic;
};

DIFFATTN_NAMESPACE_END
