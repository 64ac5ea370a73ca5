// SPDX-License-Identifier: MIT
#pragma once

// The layer level of a golden file: hidden states in, hidden states out.

#include <diffattn/models/layer.hpp>

#include "golden_case.hpp"

namespace test {

template <class T>
class golden_layer {
 public:
  /// Reads more tensors of the case, which must outlive it.
  explicit golden_layer(golden_case<T>& c) : case_(c), is_own_(c.config.keys == diffattn::key_source::own) {
    const golden_file& f = c.file;
    if (!f.has("layer.x") || !f.has("layer.out"))
      throw llm::load_error(f.path(), "has no tensors of the layer level: \"layer.x\" and \"layer.out\"");
    for (const golden_sequence& s : c.sequences)
      if (s.rows > s.keys) throw llm::load_error(f.path(), "tensor \"layer.x\": has fewer rows than \"layer.out\"");
    if (!is_own_ && !c.pieces.empty()) throw f.error("calls", "cannot be what a layer with borrowed keys was fed");
    tokens_ = is_own_ ? c.keys : c.rows, width_ = c.config.model_width;
    x_ = c.numbers("layer.x", {c.batch, tokens_, width_});
    f.expect("layer.out", llm::dtype::f64, {c.batch, c.rows, width_});
    args_.config = c.config;
    read_weights(c);
    first_.resize(c.sequences.size());
    if (c.config.rotates)
      read_rope();
    else if (f.has("layer.cos") || f.has("layer.sin") || f.has("layer.positions"))
      throw f.error("rope_style", "does not go with the rotary tables");
  }

  const char* result() const { return "layer.out"; }

  std::vector<T> run() const { return stored_rows(at_once(args_, case_.args.mask.key_ranges)); }

  std::vector<T> replay() const {
    std::vector<T> all(size());
    golden_cache memory(case_.cache_config());
    case_.for_each_piece([&](index_t i, index_t begin, index_t end) {
      const golden_sequence& s = case_.sequences[static_cast<std::size_t>(i)];
      diffattn::layer_args<T> a = call(args_, s, begin, end - begin, all);
      const index_t position = first_[static_cast<std::size_t>(i)] + begin;
      const key_range seen = case_.range(s, end);
      a.cache = &memory.cache, a.sequences = &i, a.positions = &position, a.key_ranges = &seen;
      forward(a);
    });
    return stored_rows(all);
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(case_.batch * tokens_ * width_); }
  /// Where a sequence begins in layer.x, and how many of its rows are there.
  index_t begin(const golden_sequence& s) const { return is_own_ ? s.key : s.row; }
  index_t count(const golden_sequence& s) const { return is_own_ ? s.keys : s.rows; }

  /// The call on some tokens of one sequence.
  diffattn::layer_args<T> call(diffattn::layer_args<T> a, const golden_sequence& s, index_t first, index_t n,
                               std::vector<T>& all) const {
    a.x = part(diffattn::view(x_, case_.batch, tokens_, 1, width_), s.entry, begin(s) + first, n);
    a.out = part(diffattn::view(all.data(), case_.batch, tokens_, 1, width_), s.entry, begin(s) + first, n);
    if (!is_own_) a.keys_and_values = view_of_tensors(part(k_in_, s.entry, s.key, s.keys), part(v_in_, s.entry, s.key, s.keys));
    return a;
  }
  /// All rows of x: one call, or one for each packed sequence.
  std::vector<T> at_once(diffattn::layer_args<T> a, const key_range* ranges) const {
    std::vector<T> all(size());
    if (case_.is_packed()) {
      for (std::size_t i = 0; i < first_.size(); ++i) {
        diffattn::layer_args<T> one = call(a, case_.sequences[i], 0, count(case_.sequences[i]), all);
        one.positions = &first_[i];
        forward(one);
      }
      return all;
    }
    a.x = diffattn::view(x_, case_.batch, tokens_, 1, width_);
    a.out = diffattn::view(all.data(), case_.batch, tokens_, 1, width_);
    if (!is_own_) a.keys_and_values = view_of_tensors(k_in_, v_in_);
    a.positions = first_.data(), a.key_ranges = ranges;
    forward(a);
    return all;
  }

  /// The last rows of each sequence.
  std::vector<T> last_rows(const std::vector<T>& all) const {
    std::vector<T> out(static_cast<std::size_t>(case_.batch * case_.rows * width_));
    for (const golden_sequence& s : case_.sequences) {
      const T* const last = all.data() + (s.entry * tokens_ + begin(s) + count(s) - s.rows) * width_;
      std::copy_n(last, s.rows * width_, out.data() + (s.entry * case_.rows + s.row) * width_);
    }
    return out;
  }
  /// The same, those of padding as the file has them.
  std::vector<T> stored_rows(const std::vector<T>& all) const {
    std::vector<T> out = last_rows(all);
    case_.fill_padding(out, [&](bool zero_queries, const key_range* ranges) {
      diffattn::layer_args<T> a = args_;
      const std::vector<T> zeros(static_cast<std::size_t>(case_.args.q.token_stride * width_));
      if (zero_queries) {
        a.config.causal = false, a.config.window = diffattn::attention_mask::unlimited;
        a.weights.q = {zeros.data(), nullptr};
      }
      return last_rows(at_once(a, ranges));
    });
    return out;
  }

  void read_weights(golden_case<T>& c) {
    const index_t q = c.args.q.token_stride, heads = c.heads_width();
    const auto linear = [&](const char* weight, const char* bias, index_t outputs, index_t inputs) {
      return diffattn::linear<T>{c.numbers(weight, {outputs, inputs}), c.numbers(bias, {outputs}, true)};
    };
    diffattn::layer_weights<T>& w = args_.weights = c.weights;
    w.q = linear("layer.wq", "layer.bq", q, width_), w.out = linear("layer.wo", "layer.bo", width_, heads);
    if (is_own_) {
      w.k = linear("layer.wk", "layer.bk", c.args.k.token_stride, width_);
      w.v = linear("layer.wv", "layer.bv", c.args.v.token_stride, width_);
    } else {
      k_in_ = c.tensor("layer.k_in", c.keys, c.args.k.heads, c.args.k.width);
      v_in_ = c.tensor("layer.v_in", c.keys, c.args.v.heads, c.args.v.width);
    }
    // Those that the layer does not have are refused by its check.
    w.lambda_gate.weight =
        c.numbers("layer.w_lambda", {c.config.heads.heads, width_}, c.config.lambda != diffattn::lambda_rule::gate);
    w.q_norm.weight = c.numbers("layer.q_norm_weight", {c.config.head_width}, true);
    w.k_norm.weight = c.numbers("layer.k_norm_weight", {c.config.head_width}, true);
    w.scale_norm.weight = c.numbers("layer.scale_norm_weight", {heads}, true);
  }

  /// One table for all positions from the rows of the file, computed where it has none: padding may have any position, while
  /// ours counts on. Equal positions must have equal rows, near to what rope_theta makes.
  void read_rope() {
    const golden_file& f = case_.file;
    const auto fail = [&](const char* tensor, const char* wrong) {
      return llm::load_error(f.path(), std::string("tensor \"") + tensor + "\": " + wrong);
    };
    const std::vector<double>& stored = f.expect("layer.positions", llm::dtype::i64, {case_.batch, tokens_}).values;
    for (const double p : stored)
      if (!(std::fabs(p) < 0x1p53)) throw fail("layer.positions", "has one that is too large");
    const std::vector<index_t> positions(stored.begin(), stored.end());
    index_t low = std::numeric_limits<index_t>::max(), high = std::numeric_limits<index_t>::min();
    for (std::size_t i = 0; i < first_.size(); ++i) {
      const golden_sequence& s = case_.sequences[i];
      const index_t* const own = positions.data() + s.entry * tokens_ + begin(s);
      const key_range valid = is_own_ ? case_.range(s, s.keys) : key_range{0, s.rows};
      if (valid.begin < valid.end) first_[i] = own[valid.begin] - valid.begin;
      for (index_t t = valid.begin; t < valid.end; ++t)
        if (own[t] != first_[i] + t) throw fail("layer.positions", "those of valid tokens are not consecutive");
      low = std::min(low, first_[i]), high = std::max(high, first_[i] + count(s));
    }
    if (high - low > index_t{1} << 20) throw fail("layer.positions", "lie too far apart for one table");

    diffattn::rope_config rope;
    rope.width = case_.config.head_width, rope.base = f.number("rope_theta");
    if (check(rope) != diffattn::status::ok) throw f.error("rope_theta", "is no base for the width of a head");
    const auto pairs = static_cast<std::size_t>(rope.width / 2), n = static_cast<std::size_t>(high - low);
    cos_.resize(n * pairs), sin_.resize(n * pairs);
    throw_if_error(fill_rope_table(rope, low, high - low, cos_.data(), sin_.data()));
    for (const char* name : {"layer.cos", "layer.sin"}) {
      const std::vector<double>& rows = f.expect(name, llm::dtype::f32, {case_.batch, tokens_, rope.width / 2}).values;
      std::vector<float>& table = name[6] == 'c' ? cos_ : sin_;
      std::vector<bool> known(n);
      for (std::size_t t = 0; t < positions.size(); ++t) {
        if (positions[t] < low || positions[t] >= high) continue;
        const auto row = static_cast<std::size_t>(positions[t] - low);
        for (std::size_t c = 0; c < pairs; ++c) {
          const double x = rows[t * pairs + c], ours = static_cast<double>(table[row * pairs + c]);
          if (known[row] ? x != ours : !(std::fabs(x - ours) <= std::fabs(stored[t]) * 0x1p-22))
            throw fail(name, "is not what rope_theta makes of the positions, or differs where they are equal");
          table[row * pairs + c] = static_cast<float>(x);
        }
        known[row] = true;
      }
    }
    args_.rope = {cos_.data(), sin_.data(), high - low, rope.width, case_.config.rope, low};
  }

  const golden_case<T>& case_;
  bool is_own_;
  index_t tokens_ = 0, width_ = 0;  ///< of layer.x
  diffattn::layer_args<T> args_;
  const T* x_ = nullptr;
  tensor_view<const T> k_in_, v_in_;
  std::vector<index_t> first_;  ///< [sequence] the position of its first token
  std::vector<float> cos_, sin_;
};

}  // namespace test
