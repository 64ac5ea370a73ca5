// SPDX-License-Identifier: MIT
#pragma once

// What a call is told: one aggregate for differential attention, one for standard attention. Set the fields that matter and
// leave the rest; every field is a run-time value.

#include "heads.hpp"
#include "lambda.hpp"
#include "mask.hpp"
#include "norm.hpp"
#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// Differential attention:
///   out = gain · norm( (α · softmax(q₁k₁ᵀ·scale + mask) − λ · softmax(q₂k₂ᵀ·scale + mask)) · v )
/// for every differential head of `heads` (arXiv 2410.05258, section 2; version 2: norm = head_norm<T>::none()).
template <class T>
struct forward_args {
  tensor_view<const T> q;  ///< [batch, q_len, query heads, d]
  tensor_view<const T> k;  ///< [batch, kv_len, key heads, d]
  tensor_view<const T> v;  ///< [batch, kv_len, value heads, dv or dv/2]
  tensor_view<T> out;      ///< [batch, q_len, differential heads, dv]; may not overlap an input
  head_map heads;
  lambda_view<T> lambda;        ///< λ; must be given
  lambda_view<T> alpha = T(1);  ///< factor of the first map
  head_norm<T> norm;
  attention_mask mask;
  T scale = T(0);  ///< factor on q·k; 0 = 1/sqrt(d)

  token_head_view<T> lse1,
      lse2;  ///< optional: natural log of Σ exp(logit) of each map, [batch, q_len, heads]; −∞ for a row without keys
  tensor_view<T> out1, out2;  ///< optional: softmax₁·v and softmax₂·v, shaped as out. Each costs one more product with v; `out`
                              ///< is the same bit for bit
};

/// Standard attention, out = softmax(q kᵀ·scale + mask) · v, by the same kernels. Query head h reads key and value head
/// h / (query heads / key heads).
template <class T>
struct attention_args {
  tensor_view<const T> q;  ///< [batch, q_len, query heads, d]
  tensor_view<const T> k;  ///< [batch, kv_len, key heads, d]
  tensor_view<const T> v;  ///< [batch, kv_len, key heads, dv]
  tensor_view<T> out;      ///< [batch, q_len, query heads, dv]
  attention_mask mask;
  T scale = T(0);          ///< factor on q·k; 0 = 1/sqrt(d)
  token_head_view<T> lse;  ///< optional: natural log of Σ exp(logit), [batch, q_len, query heads]
};

DIFFATTN_NAMESPACE_END
