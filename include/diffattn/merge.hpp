// SPDX-License-Identifier: MIT
#pragma once

// Attention over keys in several parts, on several machines or in several calls: each part gives its two products and their
// log-sum-exps (the optional outputs of `forward`), and `merge` makes of them the result over all keys:
//
//   lse = ln Σ exp(lse_p)      softmax · v = Σ exp(lse_p - lse) · (softmax · v)_p       for each map
//   out = gain · norm(α · (softmax₁ · v) − λ · (softmax₂ · v))
//
// No approximation is made, but a log-sum-exp in float carries its own rounding: a part's share errs by |lse| 2^-24 of itself,
// 3e-4 for logits of 5000. (The identity is that of flash decoding: https://pytorch.org/blog/flash-decoding.) The calls mirror
// those of forward.hpp. A call that splits its own keys between threads needs none of this: `forward` does so by itself.

#include "check.hpp"
#include "executor.hpp"
#include "kernel/epilogue.hpp"
#include "kernel/rows.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// What one part of the keys gave, shaped as the merged result. A sink belongs to the whole row: give it to one part only.
template <class R>
struct attention_part {
  tensor_view<const R> out1, out2;      ///< softmax · v of each map over the keys of the part, [batch, q_len, heads, dv]
  token_head_view<const R> lse1, lse2;  ///< natural log-sum-exps, [batch, q_len, heads]; −∞: neither key nor sink
};

/// Parts of differential attention. T is the type of `out`, as in `forward_args`.
template <class T>
struct merge_args {
  using real = compute_type<T>;

  const attention_part<real>* parts = nullptr;  ///< [count]
  index_t count = 0;
  tensor_view<T> out;  ///< [batch, q_len, heads, dv]; may not overlap an input
  lambda_view<real> lambda;
  lambda_view<real> alpha = real(1);
  head_norm<real> norm;
  token_head_view<real> lse1, lse2;  ///< optional: log-sum-exps over all parts
  tensor_view<real> out1, out2;      ///< optional: products over all parts. With them parts can be merged in a tree
};

/// Parts of standard attention: only `out1` and `lse1` of each part are read.
template <class T>
struct merge_attention_args {
  using real = compute_type<T>;

  const attention_part<real>* parts = nullptr;
  index_t count = 0;
  tensor_view<T> out;
  token_head_view<real> lse;
};

DIFFATTN_NAMESPACE_END

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace merging {

/// One-map merging in the words of two.
template <class T>
DIFFATTN_INLINE merge_args<T> one_map(const merge_attention_args<T>& a) noexcept {
  merge_args<T> m;
  m.parts = a.parts, m.count = a.count, m.out = a.out, m.lse1 = a.lse;
  m.lambda = compute_type<T>(0), m.norm = head_norm<compute_type<T>>::none();
  return m;
}

/// The rules of `forward` for everything but the parts: a call whose keys are empty.
template <class T>
DIFFATTN_INLINE forward_args<T> as_forward(const merge_args<T>& a) noexcept {
  forward_args<T> f;
  f.q = {a.out.data, a.out.batch, a.out.tokens, 0, 1, 0, 0, 0, 1};
  f.out = a.out, f.lambda = a.lambda, f.alpha = a.alpha, f.norm = a.norm;
  f.lse1 = a.lse1, f.lse2 = a.lse2;
  if (a.out1.data) f.out1 = a.out1;  // the sizes and strides of one that is not given mean nothing
  if (a.out2.data) f.out2 = a.out2;
  return f;
}

/// Does a part have the sizes of `out`? Only the maps that are read count.
template <int Maps, class T>
inline bool fits(const attention_part<compute_type<T>>& part, const merge_args<T>& a) noexcept {
  constexpr status wrong = status::merge_part_shape;
  const bool empty = a.out.batch == 0 || a.out.tokens == 0 || a.out.heads == 0;
  for (int m = 0; m < Maps; ++m) {
    const auto& x = m == 0 ? part.out1 : part.out2;
    const auto& lse = m == 0 ? part.lse1 : part.lse2;
    if (checks::tensor(x, wrong, wrong, wrong) != status::ok || x.batch != a.out.batch || x.tokens != a.out.tokens ||
        x.heads != a.out.heads || x.width != a.out.width || (!lse.data && !empty))
      return false;
    const index_t extents[3] = {checks::capped_product(a.out.batch, lse.batch_stride),
                                checks::capped_product(a.out.tokens, lse.token_stride),
                                checks::capped_product(a.out.heads, lse.head_stride)};
    for (const index_t e : extents)
      if (e >= checks::limit / 64) return false;
  }
  return true;
}

/// Does memory hold anything of parts that fit?
template <int Maps, class T>
inline bool intersects_parts(checks::byte_range r, const merge_args<T>& a) noexcept {
  const checks::axis all[1] = {{a.count, 1}};
  bool hit = checks::intersect(r, checks::bytes_of(a.parts, all, 1));
  for (index_t p = 0; p < a.count && !hit; ++p) {
    const attention_part<compute_type<T>>& x = a.parts[p];
    hit = checks::intersect(r, checks::bytes_of(x.out1)) || checks::intersect(r, checks::bytes_of(x.lse1, a.out));
    if (Maps == 2)
      hit |= checks::intersect(r, checks::bytes_of(x.out2)) || checks::intersect(r, checks::bytes_of(x.lse2, a.out));
  }
  return hit;
}

template <int Maps, class T>
inline status check(const merge_args<T>& a) noexcept {
  static_assert(is_element<T>, "diffattn takes tensors of float, double, f16 and bf16");
  status s = checks::tensor(a.out, status::out_null, status::out_size, status::out_width_stride);
  if (s != status::ok) return s;
  if (!a.parts || a.count <= 0 || a.count >= checks::limit / 64) return status::merge_parts;
  const forward_args<T> f = as_forward(a);
  if ((s = checks::coefficients(f)) != status::ok) return s;
  if (!checks::distinct(a.out)) return status::out_strides;
  const checks::byte_range out = checks::bytes_of(a.out);
  for (const checks::byte_range& p : checks::parameters_of(f).ranges)
    if (checks::intersect(out, p)) return status::out_overlaps_parameter;
  if ((s = checks::optional_outputs(f)) != status::ok) return s;
  for (index_t p = 0; p < a.count; ++p)
    if (!fits<Maps>(a.parts[p], a)) return status::merge_part_shape;
  const checks::byte_range written[5] = {out, checks::bytes_of(f.out1), checks::bytes_of(f.out2),
                                         checks::bytes_of(a.lse1, a.out), checks::bytes_of(a.lse2, a.out)};
  for (const checks::byte_range& w : written)
    if (intersects_parts<Maps>(w, a)) return status::merge_part_shape;
  return status::ok;
}

/// Rows of a task: one register of them shares the norm.
template <class T>
inline constexpr index_t task_rows = simd::lanes<compute_type<T>>;

/// One worker's memory: rows of both maps, and their transpose.
template <class T>
inline std::size_t bytes_needed(const merge_args<T>& a, index_t workers) noexcept {
  arena memory;
  if (a.out.batch == 0 || a.out.tokens == 0 || a.out.heads == 0) return 0;
  memory.take<compute_type<T>>(static_cast<std::size_t>(3 * task_rows<T> * a.out.width), static_cast<std::size_t>(workers));
  return memory.bytes();
}

/// Σ exp(lse_p - lse) · x_p of one map and row to `row`, and the log-sum-exp.
template <class R>
inline R merge_row(const attention_part<R>* parts, index_t count, int map, index_t b, index_t t, index_t h, index_t width,
                   R* row) noexcept {
  const auto lse = [&](index_t p) { return (map == 0 ? parts[p].lse1 : parts[p].lse2).at(b, t, h); };
  constexpr R none = -std::numeric_limits<R>::infinity();
  R top = none, sum = R(0);
  for (index_t p = 0; p < count; ++p)
    if (lse(p) > top) top = lse(p);
  for (index_t c = 0; c < width; ++c) row[c] = R(0);
  for (index_t p = 0; p < count; ++p) {
    if (lse(p) == none) continue;
    const R weight = std::exp(lse(p) - (top == none ? R(0) : top));
    const R* const x = (map == 0 ? parts[p].out1 : parts[p].out2).at(b, t, h);
    sum += weight;
    for (index_t c = 0; c < width; ++c) row[c] += weight * x[c];
  }
  if (sum == R(0)) return none;
  for (index_t c = 0; c < width; ++c) row[c] /= sum;
  return top + std::log(sum);
}

template <int Maps, class T, class Executor>
inline status run(const merge_args<T>& a, workspace scratch, Executor& executor) noexcept {
  using real = compute_type<T>;
  const index_t workers = executor.workers(), rows = a.out.batch * a.out.tokens * a.out.heads, dv = a.out.width;
  if (const status s = checks::workers(workers); s != status::ok) return s;
  if (const status s = checks::memory(as_forward(a), scratch, bytes_needed(a, workers)); s != status::ok) return s;
  if (rows == 0) return status::ok;
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(scratch.data);
  if (intersects_parts<Maps>({at, at + scratch.bytes}, a)) return status::workspace_overlap;
  constexpr index_t step = task_rows<T>;
  arena memory(scratch.data);
  real* const pieces = memory.take<real>(static_cast<std::size_t>(3 * step * dv), static_cast<std::size_t>(workers));
  executor.run((rows + step - 1) / step, [&](index_t task, index_t worker) {
    real *const first = pieces + worker * 3 * step * dv, *const second = first + step * dv, *const lanes = second + step * dv;
    const index_t begin = task * step, count = rows - begin < step ? rows - begin : step;
    const auto each_row = [&](auto&& f) {
      for (index_t i = 0; i < count; ++i) {
        const index_t row = begin + i, h = row % a.out.heads, t = row / a.out.heads % a.out.tokens;
        f(i, row / a.out.heads / a.out.tokens, t, h);
      }
    };
    real scale[step] = {};
    each_row([&](index_t i, index_t b, index_t t, index_t h) {
      const token_head_view<real>* const lse[2] = {&a.lse1, &a.lse2};
      const tensor_view<real>* const raw[2] = {&a.out1, &a.out2};
      real* const map[2] = {first + i * dv, second + i * dv};
      real keys[2] = {};  // 0: the map has none
      for (int m = 0; m < Maps; ++m) {
        const real total = merge_row(a.parts, a.count, m, b, t, h, dv, map[m]);
        keys[m] = total == -std::numeric_limits<real>::infinity() ? real(0) : real(1);
        if (lse[m]->data) lse[m]->at(b, t, h) = total;
        if (raw[m]->data) kernel::write_row(map[m], dv, raw[m]->at(b, t, h));
      }
      scale[i] = real(1);
      if (Maps == 1) return;
      // As `forward` mixes: equal maps with equal factors cancel to exactly 0.
      const kernel::coefficients<real> mix = kernel::mix_maps(a.alpha.at(b, t, h), a.lambda.at(b, t, h), keys[0], keys[1]);
      for (index_t c = 0; c < dv; ++c) map[0][c] = mix.c1 * map[0][c] - mix.c2 * map[1][c];
      scale[i] = mix.scale;
    });
    kernel::normalise_rows(first, dv, count, dv, scale, a.norm, lanes);
    each_row([&](index_t i, index_t b, index_t t, index_t h) { kernel::write_row(first + i * dv, dv, a.out.at(b, t, h)); });
  });
  return status::ok;
}

}  // namespace merging

/// The first thing wrong with the arguments, or ok.
template <class T>
inline status check(const merge_args<T>& args) noexcept {
  return merging::check<2>(args);
}
template <class T>
inline status check(const merge_attention_args<T>& args) noexcept {
  return merging::check<1>(merging::one_map(args));
}

/// Bytes of workspace for an executor with `workers` workers; 0 if the arguments are wrong or nothing is to be done.
template <class T>
inline std::size_t workspace_bytes(const merge_args<T>& args, index_t workers = 1) noexcept {
  const bool valid = checks::workers(workers) == status::ok && check(args) == status::ok;
  return valid ? merging::bytes_needed(args, workers) : 0;
}
template <class T>
inline std::size_t workspace_bytes(const merge_attention_args<T>& args, index_t workers = 1) noexcept {
  const bool valid = checks::workers(workers) == status::ok && check(args) == status::ok;
  return valid ? merging::bytes_needed(merging::one_map(args), workers) : 0;
}

/// Computes args.out from the parts. A part whose log-sum-exp is −∞ is not read; NaN in a part reaches its row and head.
template <class T, class Executor = serial_executor>
inline status merge(const merge_args<T>& args, workspace scratch, Executor&& executor = Executor{}) noexcept {
  if (const status s = check(args); s != status::ok) return s;
  return merging::run<2>(args, scratch, executor);
}
template <class T, class Executor = serial_executor>
inline status merge(const merge_attention_args<T>& args, workspace scratch, Executor&& executor = Executor{}) noexcept {
  if (const status s = check(args); s != status::ok) return s;
  return merging::run<1>(merging::one_map(args), scratch, executor);
}

/// As above with scratch memory of its own; throws std::invalid_argument.
template <class Args>
inline void merge(const Args& args) {
  throw_if_error(check(args));
  const owned_workspace scratch(workspace_bytes(args));
  throw_if_error(merge(args, scratch.view()));
}

DIFFATTN_ISA_NAMESPACE_END
