// SPDX-License-Identifier: MIT
#pragma once

// Rotary position embedding (arXiv 2104.09864): channels in pairs (x1, x2), pair i of a row at position p turned by the angle
// p · f(i). The rotation reads cosines and sines from a table that somebody owns; `fill_rope_table` computes one for every
// published rule for f. In differential attention each head of each map is rotated on its own, before heads are paired.

#include <cmath>
#include <type_traits>

#include "status.hpp"
#include "tensor.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// Which channels form pair i. A wrong style gives wrong results silently.
enum class rope_style {
  interleaved,  ///< 2i and 2i + 1: microsoft/unilm (kernel/rotary.py), GPT-J
  half          ///< i and i + width / 2: Hugging Face (rotate_half), GPT-NeoX, DiffLlama, Motif
};

/// A table of rotations; owns nothing. Row p - first_position belongs to position p.
struct rope_view {
  const float* cos = nullptr;  ///< [positions][width / 2]
  const float* sin = nullptr;  ///< the same
  index_t positions = 0;       ///< rows
  index_t width = 0;           ///< channels that rotate, even: the first ones of a head. The rest pass unchanged
  rope_style style = rope_style::interleaved;
  index_t first_position = 0;  ///< the position of row 0; a table may start anywhere, also below 0

  DIFFATTN_INLINE bool is_given() const noexcept { return cos || sin || positions != 0 || width != 0; }
  /// Are the positions first … first + count - 1 in the table? Only for views that `check` accepts.
  DIFFATTN_INLINE bool holds(index_t first, index_t count) const noexcept {
    return count <= 0 || (count <= positions && first >= first_position && first <= first_position + (positions - count));
  }
  /// Where the row of a position in the table begins.
  DIFFATTN_INLINE index_t row(index_t position) const noexcept { return (position - first_position) * (width / 2); }
};

/// Positions stay below this: doubles count exactly that far, and no sum of a few of them overflows.
inline constexpr index_t max_rope_position = index_t{1} << 53;

/// How a model stretches the positions that it was trained on. Formulas at `rope_frequency`.
enum class rope_scaling {
  none,
  linear,       ///< position interpolation, arXiv 2306.15595
  ntk,          ///< a larger base
  dynamic_ntk,  ///< a base that grows with the length of the sequence
  yarn,         ///< low frequencies interpolated, high ones kept, scores sharpened; arXiv 2309.00071
  llama3        ///< Llama 3.1
};

/// What cosines and sines are made of. Names are those of Hugging Face configurations, or follow in parentheses.
struct rope_config {
  index_t width = 0;    ///< channels that rotate, even (head_dim · partial_rotary_factor)
  double base = 10000;  ///< (rope_theta)
  rope_scaling scaling = rope_scaling::none;
  double factor = 1;               ///< every rule but none
  index_t original_positions = 0;  ///< dynamic_ntk, yarn, llama3 (original_max_position_embeddings)
  index_t sequence_length = 0;     ///< dynamic_ntk: tokens of the sequence; up to original_positions nothing is stretched
  double low_freq_factor = 1, high_freq_factor = 4;             ///< llama3
  double beta_fast = 32, beta_slow = 1;                         ///< yarn: turns within original_positions
  bool truncate = true;                                         ///< yarn: the ends of the ramp are whole pairs
  double attention_factor = 0, mscale = 0, mscale_all_dim = 0;  ///< yarn: see `rope_attention_factor`; 0: not given
};

DIFFATTN_NAMESPACE_END

// Arithmetic, and lambdas that a compiler may leave out of line: one copy for each instruction set.
DIFFATTN_ISA_NAMESPACE_BEGIN

/// Can heads of `head_width` channels be rotated by this table? rope_table: a null pointer, a width that is odd or not
/// positive, or a size that overflows; rope_width: more channels than a head has.
inline status check(const rope_view& r, index_t head_width) noexcept {
  if (!r.cos || !r.sin || r.width <= 0 || r.width % 2 != 0) return status::rope_table;
  if (r.positions < 0 || r.positions > max_rope_position / r.width) return status::rope_table;
  if (r.first_position < -max_rope_position || r.first_position > max_rope_position) return status::rope_table;
  return r.width <= head_width ? status::ok : status::rope_width;
}

/// rope_table unless the width is even and positive and every number finite and within its domain, read or not: base > 1,
/// factor >= 1, high_freq_factor > low_freq_factor > 0, beta_fast >= beta_slow > 0, the rest >= 0; original_positions > 0 for
/// the rules that read it.
inline status check(const rope_config& c) noexcept {
  const auto within = [](double low, double x) { return low <= x && std::isfinite(x); };
  const bool rule = c.scaling >= rope_scaling::none && c.scaling <= rope_scaling::llama3;
  const bool sizes = c.width > 0 && c.width % 2 == 0 && c.sequence_length >= 0 &&
                     c.original_positions >= (c.scaling < rope_scaling::dynamic_ntk ? 0 : 1);
  const bool numbers = c.base > 1 && within(1, c.base) && within(1, c.factor) && c.low_freq_factor > 0 && c.beta_slow > 0 &&
                       c.high_freq_factor > c.low_freq_factor && within(0, c.high_freq_factor) &&
                       within(c.beta_slow, c.beta_fast) && within(0, c.attention_factor) && within(0, c.mscale) &&
                       within(0, c.mscale_all_dim);
  return rule && sizes && numbers ? status::ok : status::rope_table;
}

/// The angle of pair i from one position to the next, in radians (the rules as in Hugging Face, modeling_rope_utils.py):
///
///   f(i) = base^(-2i / width)                     none
///   f / factor                                    linear
///   f with base · s^(width / (width - 2))         ntk: s = factor; dynamic_ntk: s = factor · n / n0 - (factor - 1)
///   f · (keep + (1 - keep) / factor)              yarn, llama3
///
/// n0 = original_positions, n = max(sequence_length, n0). llama3: keep rises from 0 to 1 as the turns n0 · f / 2π within the
/// original context rise from low_freq_factor to high_freq_factor. yarn: keep falls from 1 to 0 between the pairs that make
/// beta_fast and beta_slow turns, linearly in i.
inline double rope_frequency(const rope_config& c, index_t i) noexcept {
  constexpr double two_pi = 6.283185307179586;
  const auto clamp = [](double x) { return std::fmin(std::fmax(x, 0.0), 1.0); };
  const double width = static_cast<double>(c.width), pair = static_cast<double>(i);
  const double n0 = static_cast<double>(c.original_positions), n = std::fmax(static_cast<double>(c.sequence_length), n0);

  double stretch = 1;
  if (c.scaling == rope_scaling::ntk) stretch = c.factor;
  if (c.scaling == rope_scaling::dynamic_ntk) stretch = c.factor * n / n0 - (c.factor - 1);
  // Pair 0 turns by 1 whatever the base is, and width 2 has no other.
  const double f = i == 0 ? 1 : std::pow(c.base * std::pow(stretch, width / (width - 2)), -2 * pair / width);

  double keep = c.scaling == rope_scaling::linear ? 0 : 1;
  if (c.scaling == rope_scaling::llama3)
    keep = clamp((n0 * f / two_pi - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor));
  if (c.scaling == rope_scaling::yarn) {
    const auto pair_of = [&](double turns) { return width * std::log(n0 / (turns * two_pi)) / (2 * std::log(c.base)); };
    double low = pair_of(c.beta_fast), high = pair_of(c.beta_slow);
    if (c.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::fmax(low, 0.0), high = std::fmin(high, width - 1);  // width - 1, not width / 2 - 1: as published
    keep = 1 - clamp((pair - low) / (low == high ? 0.001 : high - low));
  }
  return keep == 1 ? f : f * (keep + (1 - keep) / c.factor);
}

/// 1 + 0.1 · weight · ln(factor) (arXiv 2309.00071, section 3.4; `weight` is DeepSeek's mscale). Some models put its square
/// into the scale of the scores instead of, or besides, the table: that is args.scale.
inline double yarn_mscale(double factor, double weight = 1) noexcept {
  return factor <= 1 ? 1 : 1 + 0.1 * weight * std::log(factor);
}

/// What cosines and sines are multiplied by: 1 but for yarn. There attention_factor; else, if both are given,
/// yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim); else yarn_mscale(factor).
inline double rope_attention_factor(const rope_config& c) noexcept {
  if (c.scaling != rope_scaling::yarn) return 1;
  if (c.attention_factor != 0) return c.attention_factor;
  if (c.mscale == 0 || c.mscale_all_dim == 0) return yarn_mscale(c.factor);
  return yarn_mscale(c.factor, c.mscale) / yarn_mscale(c.factor, c.mscale_all_dim);
}

/// Fills cos and sin [positions][width / 2] for the positions from `first_position` on. In double, rounded once; the published
/// models compute frequency and angle in float, which moves the angle at position p by up to about p · 2^-23. rope_table: a
/// wrong `config` (see its check), a null pointer or a size that overflows; rope_position: beyond max_rope_position.
inline status fill_rope_table(const rope_config& config, index_t first_position, index_t positions, float* cos,
                              float* sin) noexcept {
  if (const status s = check(config); s != status::ok) return s;
  if (positions < 0 || positions > max_rope_position / config.width) return status::rope_table;
  if (first_position < -max_rope_position || first_position > max_rope_position - positions) return status::rope_position;
  if (positions > 0 && (!cos || !sin)) return status::rope_table;
  const index_t pairs = config.width / 2;
  const double factor = rope_attention_factor(config);
  // Frequencies cost more than a sine and need a home: a few at a time for all positions.
  constexpr index_t block = 32;
  double frequencies[block];
  for (index_t i = 0; i < pairs; i += block) {
    const index_t n = pairs - i < block ? pairs - i : block;
    for (index_t j = 0; j < n; ++j) frequencies[j] = rope_frequency(config, i + j);
    for (index_t p = 0; p < positions; ++p)
      for (index_t j = 0; j < n; ++j) {
        const double angle = static_cast<double>(first_position + p) * frequencies[j];
        cos[p * pairs + i + j] = static_cast<float>(factor * std::cos(angle));
        sin[p * pairs + i + j] = static_cast<float>(factor * std::sin(angle));
      }
  }
  return status::ok;
}

namespace rotation {

/// a b + c, fused wherever the processor can. Left to itself a compiler fuses one product of a rotation in one loop and the
/// other one in the next, and a part of a row would differ in the last bit from the same part of the whole row.
template <class T>
DIFFATTN_INLINE T fused(T a, T b, T c) noexcept {
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

/// Calls f with begin … end - 1, in steps of a constant length that compilers turn into vectors; the number after the last.
template <class F>
DIFFATTN_INLINE index_t in_steps(index_t begin, index_t end, const F& f) noexcept {
  constexpr index_t step = 16;
  for (; begin + step <= end; begin += step)
    for (index_t k = 0; k < step; ++k) f(begin + k);
  for (; begin < end; ++begin) f(begin);
  return begin;
}

}  // namespace rotation

/// Channels [i, i + n) of the row x [head width] after its rotation: x1 cos - x2 sin, x2 cos + x1 sin. For blockwise encoders:
/// reads of x only these channels and their partners. The table must hold the position; `out` [n] lies apart from x. T and Out
/// are float or double, the arithmetic is in T. Every channel has the same bits in any part of any length.
template <class T, class Out>
DIFFATTN_INLINE void rotated_channels(const rope_view& r, index_t position, const T* x, index_t i, index_t n,
                                      Out* out) noexcept {
  const float *c = r.cos + r.row(position), *s = r.sin + r.row(position);
  const auto first = [&](T x1, T x2, index_t j) { return static_cast<Out>(rotation::fused<T>(x1, c[j], -(x2 * s[j]))); };
  const auto second = [&](T x1, T x2, index_t j) { return static_cast<Out>(rotation::fused<T>(x2, c[j], x1 * s[j])); };
  const index_t end = i + n, turned = end < r.width ? end : r.width, pairs = r.width / 2;
  index_t at = i;
  if (r.style == rope_style::half) {
    const index_t middle = turned < pairs ? turned : pairs;
    at = rotation::in_steps(at, middle, [&](index_t k) { out[k - i] = first(x[k], x[k + pairs], k); });
    at = rotation::in_steps(at, turned, [&](index_t k) { out[k - i] = second(x[k - pairs], x[k], k - pairs); });
  } else if (at < turned) {
    if (at % 2 != 0) out[0] = second(x[at - 1], x[at], at / 2), ++at;
    at = 2 * rotation::in_steps(at / 2, turned / 2, [&](index_t j) {
           out[2 * j - i] = first(x[2 * j], x[2 * j + 1], j);
           out[2 * j + 1 - i] = second(x[2 * j], x[2 * j + 1], j);
         });
    if (at < turned) out[at - i] = first(x[at], x[at + 1], at / 2), ++at;
  }
  for (; at < end; ++at) out[at - i] = static_cast<Out>(x[at]);
}

/// One row: y [head width] is x rotated, y == x or apart from it. The table must hold the position.
template <class T>
DIFFATTN_INLINE void rotate(const rope_view& r, index_t position, const T* x, index_t head_width, T* y) noexcept {
  constexpr index_t block = 32;
  T first[block], second[block];  // in place: both channels of a pair are computed before one is overwritten
  const index_t pairs = r.width / 2;
  for (index_t i = 0; i < pairs; i += block) {
    const index_t n = pairs - i < block ? pairs - i : block;
    const index_t a = r.style == rope_style::half ? i : 2 * i, b = r.style == rope_style::half ? pairs + i : 2 * i + n;
    rotated_channels(r, position, x, a, n, first);
    rotated_channels(r, position, x, b, n, second);
    for (index_t j = 0; j < n; ++j) y[a + j] = first[j], y[b + j] = second[j];
  }
  rotated_channels(r, position, x, r.width, head_width - r.width, y + r.width);
}

/// A tensor [batch, tokens, heads, width]: token t of entry b has position first_position + t, plus batch_positions[b] if that
/// [batch] array is given (of each sequence, say, its length so far). `out` is `in`, or lies apart from it and the table. Every
/// argument is checked before anything is written: the codes of `check`; rope_position if the table lacks a position; those of
/// q for `in` and those of out: null, size, width stride, a shape that is not that of `in`, elements that share an address.
template <class T>
inline status rotate(const rope_view& r, std::enable_if_t<true, tensor_view<const T>> in,  // T is deduced from `out`
                     tensor_view<T> out, index_t first_position = 0, const index_t* batch_positions = nullptr) noexcept {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>, "diffattn rotates float or double");
  if (in.batch < 0 || in.tokens < 0 || in.heads < 0 || in.width <= 0) return status::q_size;
  if (out.batch != in.batch) return status::out_batch;
  if (out.tokens != in.tokens) return status::out_tokens;
  if (out.heads != in.heads) return status::out_heads;
  if (out.width != in.width) return status::out_width;
  if (in.width > 1 && in.width_stride != 1) return status::q_width_stride;
  if (in.width > 1 && out.width_stride != 1) return status::out_width_stride;
  if (const status s = check(r, in.width); s != status::ok) return s;
  if (in.batch == 0 || in.tokens == 0 || in.heads == 0) return status::ok;
  if (!in.data) return status::q_null;
  if (!out.data) return status::out_null;
  const bool shared = (out.batch > 1 && out.batch_stride == 0) || (out.tokens > 1 && out.token_stride == 0) ||
                      (out.heads > 1 && out.head_stride == 0);
  if (shared) return status::out_strides;  // in place they would turn twice
  if (first_position < -max_rope_position || first_position > max_rope_position) return status::rope_position;
  rope_view table = r;
  table.first_position -= first_position;  // instead of adding to every position: nothing overflows
  const auto start = [&](index_t b) { return batch_positions ? batch_positions[b] : 0; };
  for (index_t b = 0; b < in.batch; ++b)
    if (!table.holds(start(b), in.tokens)) return status::rope_position;
  for (index_t b = 0; b < in.batch; ++b)
    for (index_t t = 0; t < in.tokens; ++t)
      for (index_t h = 0; h < in.heads; ++h) rotate(table, start(b) + t, in.at(b, t, h), in.width, out.at(b, t, h));
  return status::ok;
}

DIFFATTN_ISA_NAMESPACE_END
