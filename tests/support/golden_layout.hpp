// SPDX-License-Identifier: MIT
#pragma once

// How the rows of a golden file belong together: sequences, padding, and the calls that they were fed in. Whatever does not fit
// together is thrown.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "golden_model.hpp"

namespace test {

using diffattn::key_range;

/// Rows of one sequence in kernel.q and in kernel.k. A batch entry is a sequence; packed, all lie in entry 0.
struct golden_sequence {
  index_t entry = 0, row = 0, rows = 0, key = 0, keys = 0;

  /// The row of that key's query; negative for keys before the stored rows.
  index_t row_of(index_t token) const { return token - (keys - rows); }
};

/// What the results hold in rows of padding.
enum class padding_rows {
  none,        ///< there are none
  zero,        ///< no keys were seen
  uniform,     ///< all keys were seen alike
  unspecified  ///< anything
};

class golden_layout {
 public:
  explicit golden_layout(const std::string& path) : file(path), heads(listed_heads(file)), config(layer_of(file, heads)) {
    expect_known_tensors();
    read_sizes();
    read_sequences();
    read_mask();
    read_calls();
  }
  golden_layout(const golden_layout&) = delete;  // the config may point to heads

  golden_file file;
  std::vector<head_indices> heads;  ///< as listed
  layer_config config;
  index_t batch = 0, rows = 0, keys = 0, out_heads = 0, out_width = 0;
  std::vector<golden_sequence> sequences;
  std::vector<key_range> ranges;  ///< of each batch entry; empty: all keys
  padding_rows padding = padding_rows::none;

  /// [sequence] the tokens of each call, the first ones of which only fill the cache. Empty: one call without a cache.
  std::vector<std::vector<index_t>> pieces;
  bool is_paged = false;

  bool is_packed() const { return file.has("kernel.cu_q"); }

  /// Calls f(sequence, first token, end) as the file says the tokens were fed, all sequences in turns.
  template <class F>
  void for_each_piece(F&& f) const {
    std::vector<index_t> done(pieces.size());
    for (std::size_t step = 0, longest = 1; step < longest; ++step)
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        longest = std::max(longest, pieces[i].size());
        if (step >= pieces[i].size() || pieces[i][step] == 0) continue;
        f(static_cast<index_t>(i), done[i], done[i] + pieces[i][step]);
        done[i] += pieces[i][step];
      }
  }

  /// The keys that a sequence may see once it holds `length` tokens.
  key_range range(const golden_sequence& s, index_t length) const {
    const key_range r = ranges.empty() ? key_range{0, length} : ranges[static_cast<std::size_t>(s.entry)];
    return {std::min(r.begin, length), std::min(r.end, length)};
  }

  /// The stored result, but `found` where rows of padding are nothing to compare with: those that nobody specified, and, unless
  /// `found` has been filled, those that are not what a call gives.
  std::vector<double> expected(const char* name, const std::vector<double>& found, bool is_filled = true) const {
    std::vector<double> e = file[name].values;
    if (padding == padding_rows::none || padding == padding_rows::zero || (padding == padding_rows::uniform && is_filled))
      return e;
    for_padding(e.size(), [&](std::size_t i) { e[i] = found[i]; });
    return e;
  }

  /// f(i) for the numbers of rows of padding, of `size` in all rows.
  template <class F>
  void for_padding(std::size_t size, F&& f) const {
    const std::vector<double>& valid = file["kernel.row_valid"].values;
    const std::size_t row = size / valid.size();
    for (std::size_t i = 0; i < size; ++i)
      if (valid[i / row] == 0) f(i);
  }

 private:
  /// A name that is not known may change the result.
  void expect_known_tensors() const {
    static const std::vector<std::string> known = split(
        "kernel.q kernel.k kernel.v kernel.lambda kernel.lambda_q1 kernel.lambda_k1 kernel.lambda_q2 kernel.lambda_k2 "
        "kernel.lambda_a kernel.lambda_b kernel.lambda_logits kernel.norm_weight kernel.diff kernel.out kernel.key_valid "
        "kernel.row_valid kernel.bias kernel.cu_q kernel.cu_k layer.x layer.wq layer.wk layer.wv layer.wo layer.bq layer.bk "
        "layer.bv layer.bo layer.w_lambda layer.k_in layer.v_in layer.positions layer.cos layer.sin layer.q_norm_weight "
        "layer.k_norm_weight layer.scale_norm_weight layer.out",
        ' ');
    for (const auto& entry : file.tensors())
      if (std::find(known.begin(), known.end(), entry.first) == known.end())
        throw llm::load_error(file.path(), "tensor " + llm::in_quotes(entry.first) + ": is not understood");
  }

  void read_sizes() {
    for (const char* name : {"kernel.q", "kernel.k"})
      if (const auto& shape = file[name].shape; shape.size() != 4 || std::count(shape.begin(), shape.end(), 0) != 0)
        throw llm::load_error(file.path(), std::string("tensor \"") + name + "\": has not four axes that are not empty");
    batch = file["kernel.q"].shape[0], rows = file["kernel.q"].shape[1], keys = file["kernel.k"].shape[1];
    out_heads = config.heads.heads, out_width = file.integer("out_head_dim", 1);
  }

  void read_sequences() {
    const bool packed = meaning<bool>(file, "layout", {{"bshd", false}, {"packed", true}});
    if (packed != is_packed() || packed != file.has("kernel.cu_k")) throw file.error("layout", "does not go with the tensors");
    if (!packed) {
      for (index_t b = 0; b < batch; ++b) sequences.push_back({b, 0, rows, 0, keys});
      return;
    }
    const auto starts = [&](const char* name, index_t end) {
      const auto n = static_cast<std::int64_t>(file["kernel.cu_q"].values.size());
      const std::vector<double>& v = file.expect(name, llm::dtype::i32, {n}).values;
      if (batch != 1 || n < 2 || v[0] != 0 || v.back() != static_cast<double>(end) || !std::is_sorted(v.begin(), v.end()))
        throw llm::load_error(file.path(), std::string("tensor \"") + name + "\": does not cut one batch entry into sequences");
      return std::vector<index_t>(v.begin(), v.end());
    };
    const std::vector<index_t> q = starts("kernel.cu_q", rows), k = starts("kernel.cu_k", keys);
    for (std::size_t i = 0; i + 1 < q.size(); ++i) sequences.push_back({0, q[i], q[i + 1] - q[i], k[i], k[i + 1] - k[i]});
  }

  void read_mask() {
    expect_rules();
    enum class mask { none, key_valid, both };
    const auto kind =
        meaning<mask>(file, "mask",
                      {{"none", mask::none},
                       {"key_valid", mask::key_valid},
                       {"key_valid; bias says the same with finite float32 minimum (causal included)", mask::both}});
    const bool has_keys = file.has("kernel.key_valid"), has_bias = file.has("kernel.bias");
    const bool has_rows = file.has("kernel.row_valid");
    if (has_keys != (kind != mask::none) || has_bias != (kind == mask::both) || (has_rows && !has_keys))
      throw file.error("mask", "does not go with the tensors");
    if (has_keys && is_packed()) throw file.error("mask", "is not understood for packed sequences");
    if (has_keys) read_ranges();
    if (has_bias) expect_bias();
    if (has_rows != file.says("pad_rows")) throw file.error("pad_rows", "is given without the tensor kernel.row_valid");
    if (has_rows) read_padding();
  }
  /// The rules in words have no variants.
  void expect_rules() const {
    const bool causal = config.causal;
    const std::string rule = !causal       ? "none"
                             : is_packed() ? "within each packed sequence: key j allowed for query row i iff j <= i + (its key "
                                             "length - its query length)"
                                           : "key j allowed for query row i iff j <= i + q_offset";
    if (file.says("causal_rule") && file.text("causal_rule") != rule)
      throw file.error("causal_rule", "is not what causal and layout mean");
    if (file.says("window_rule"))
      meaning<bool>(file, "window_rule",
                    {{"key j allowed iff j > i + q_offset - window: window keys including the current one", true}});
    if (is_packed() ? file.text("q_offset") != "per sequence" : causal && file.integer("q_offset", -keys - rows) != keys - rows)
      throw file.error("q_offset", "is not the number of keys before the first query");
  }
  const std::vector<double>& flags(const char* name, index_t n) const {
    const std::vector<double>& all = file.expect(name, llm::dtype::u8, {batch, n}).values;
    for (const double x : all)
      if (x != 0 && x != 1) throw llm::load_error(file.path(), std::string("tensor \"") + name + "\": is not made of 0 and 1");
    return all;
  }
  diffattn::attention_mask mask() const {
    diffattn::attention_mask m;
    m.causal = config.causal, m.window = config.window, m.key_ranges = ranges.data();
    return m;
  }
  void read_ranges() {
    const std::vector<double>& valid = flags("kernel.key_valid", keys);
    for (index_t b = 0; b < batch; ++b) {
      const auto from = valid.begin() + b * keys, to = from + keys;
      const auto begin = std::find(from, to, 1), end = std::find(begin, to, 0);
      if (std::find(end, to, 1) != to)
        throw llm::load_error(file.path(),
                              "tensor \"kernel.key_valid\": valid keys of a batch entry are not one range, and the "
                              "library has no boolean masks yet");
      ranges.push_back({begin - from, end - from});
    }
  }
  void expect_bias() const {
    const std::vector<double>& bias = file.expect("kernel.bias", llm::dtype::f32, {batch, rows, keys}).values;
    auto stored = bias.begin();
    for (index_t b = 0; b < batch; ++b)
      for (index_t i = 0; i < rows; ++i) {
        const key_range seen = visible_keys(mask(), rows, keys, b, i);
        for (index_t j = 0; j < keys; ++j)
          if (*stored++ != (seen.begin <= j && j < seen.end ? 0.0 : -double(std::numeric_limits<float>::max())))
            throw llm::load_error(file.path(), "tensor \"kernel.bias\": is not what causal, window and key_valid say");
      }
  }
  void read_padding() {
    padding = meaning<padding_rows>(
        file, "pad_rows",
        {{"zero", padding_rows::zero}, {"uniform", padding_rows::uniform}, {"unspecified", padding_rows::unspecified}});
    const std::vector<double>& valid = flags("kernel.row_valid", rows);
    for (index_t i = 0; i < batch * rows; ++i) {
      const key_range seen = visible_keys(mask(), rows, keys, i / rows, i % rows);
      if (padding == padding_rows::uniform && valid[static_cast<std::size_t>(i)] == 0 && seen.begin < seen.end)
        throw file.error("pad_rows", "is said of a row that sees some of the keys");
    }
  }

  /// "1 call", "14", "6,1,1", "17 then 3", or "paged cache; prefix lengths 20,33, then new tokens 3,1" (of each sequence).
  void read_calls() {
    static const std::string paged = "paged cache; prefix lengths ", then = " then ", new_tokens = ", then new tokens ";
    std::string text = file.text("calls");
    if (!file.says("calls") || text == "1 call") return;
    const auto list = [&](const std::string& part) {
      std::vector<index_t> tokens;
      for (const std::string& n : split(part, ',')) tokens.push_back(file.parse("calls", n));
      return tokens;
    };
    const std::size_t at = text.find(new_tokens);
    is_paged = text.rfind(paged, 0) == 0 && at != text.npos;
    if (is_paged) {
      const std::vector<index_t> old = list(text.substr(paged.size(), at - paged.size()));
      const std::vector<index_t> fresh = list(text.substr(at + new_tokens.size()));
      if (old.size() != sequences.size() || fresh.size() != old.size())
        throw file.error("calls", "does not list a number for each sequence");
      for (std::size_t i = 0; i < old.size(); ++i) pieces.push_back({old[i], fresh[i]});
    } else {
      if (const std::size_t word = text.find(then); word != text.npos) text.replace(word, then.size(), ",");
      pieces.assign(sequences.size(), list(text));
    }
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      index_t sum = 0;
      for (const index_t n : pieces[i]) {
        if (n < 0 || n > keys - sum) throw file.error("calls", "does not add up to the number of keys");
        sum += n;
      }
      if (sum != sequences[i].keys) throw file.error("calls", "does not add up to the number of keys");
    }
    if (!is_paged && pieces[0].size() == 1) pieces.clear();
    if (!pieces.empty() && !config.causal) throw file.error("calls", "cannot be what a layer that is not causal was fed");
  }
};

}  // namespace test
