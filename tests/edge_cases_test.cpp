// SPDX-License-Identifier: MIT
// The list of hand-made edge cases with exact results; a test row carries the number that it has there. Each is run in float
// and double, and in the 16-bit types if they hold its numbers, by both schedules, on tensors, from caches of every storage
// that holds its numbers, and on the keys in two parts, merged; with d and dv padded by zero channels, its rows at different
// places of a block of queries that see other things, and its keys among others that are hidden. What hides keys is said in
// every way there is.
//
// In other files too: E55 to E57 as index tables (heads_test), E59 (check_test), E67 and E68 (lambda_test).

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <diffattn/merge.hpp>
#include <limits>
#include <string>
#include <vector>

#include "support/calls.hpp"
#include "support/compare.hpp"
#include "support/elements.hpp"
#include "support/ways.hpp"

namespace {

using diffattn::attention_mask;
using diffattn::head_map;
using diffattn::index_t;
using diffattn::key_range;
using diffattn::sight;
using diffattn::status;
using diffattn::storage;
using test::schedule_choice;

const double ln2 = std::log(2.0), ln3 = std::log(3.0);
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

using row = std::vector<double>;

/// One row of the list. Widths are 1 unless `v` has more channels; queries are 1 unless given.
struct edge_case {
  const char* id;
  row k1, k2;
  std::vector<row> v;         ///< [channel][key]
  row lambda;                 ///< one, or one for each query
  std::vector<row> expected;  ///< [query][channel]
  bool causal = false;
  index_t offset = attention_mask::align_to_end;
  index_t window = attention_mask::unlimited;
  std::array<std::vector<row>, 2> hidden = {};  ///< of each map: [one, or each query][key], not 0: hidden. Empty: none
  row bias = {};                                ///< [key] added to the logits
  std::array<double, 2> sinks = {-infinity, -infinity};
  double cap = 0;
  row lse = {};  ///< of both maps
  row q1 = {}, q2 = {};
  double scale = 1;
  index_t repeat = 1;  ///< channels of q and k that hold the same number
  diffattn::norm_kind norm = diffattn::norm_kind::none;
  row weight = {};
  double gain = 1, eps = 1e-5;
  bool exact = false;
  double amplification = 1;  ///< of rounding errors: by a norm after a cancellation, or by large logits
};

row count(int n) {
  row r;
  for (int j = 0; j < n; ++j) r.push_back(j);
  return r;
}
/// n zeros with `x` at place `at`.
row zeros_but(int n, int at, double x) {
  row r(static_cast<std::size_t>(n));
  r[static_cast<std::size_t>(at)] = x;
  return r;
}

std::vector<edge_case> cases() {
  const row one_to_six = {1, 2, 3, 6}, odd = {1, 3, 5, 7}, zero4(4);
  std::vector<edge_case> c = {
      {"E01", {5}, {-3}, {{2}}, {0.25}, {{1.5}}},
      {"E02", {0, ln3}, {9, -9}, {{4, 8}}, {0}, {{7}}},
      {"E04", {0, ln3}, {0, ln3}, {{4, 8}}, {0.5}, {{3.5}}},
      {"E05", {0, 0}, {0, ln3}, {{4, 8}}, {-1}, {{13}}},
      {"E06", {0, 0}, {0, ln3}, {{4, 8}}, {2}, {{-8}}},
      {"E07", {0, ln3}, {0, 0}, {{4, 8}}, {1}, {{1}}},
      {"E08", {7, 7, 7, 7}, {-2, -2, -2, -2}, {one_to_six}, {0.5}, {{1.5}}},
      {"E09", {0, 0}, {0, 0}, {{4, 8}}, {0, 1}, {{6}, {0}}},
      {"E37", {0, 0}, {0, 0}, {{1, nan}, {1, 3}}, {0.5}, {{nan, 1}}},
      {"E38", {-infinity, 0}, {0, 0}, {{2, 9}}, {0}, {{9}}},
      {"E39", {infinity, 0}, {0, 0}, {{2, 9}}, {0}, {{nan}}},
      {"E40", {0, 0}, {nan, 0}, {{4, 8}}, {0}, {{nan}}},
      {"E41", {1e5, 0}, {-1e5, 0}, {{2, 9}}, {0.5}, {{-2.5}}},
      {"E43", zeros_but(65, 64, 1000), zeros_but(65, 0, 1000), {count(65)}, {1}, {{64}}},
      {"E44", row(31), row(31), {count(31)}, {0.5}, {{7.5}}},
      {"E45", row(32), row(32), {count(32)}, {0.5}, {{7.75}}},
      {"E46", row(33), row(33), {count(33)}, {0.5}, {{8}}},
      {"E47", row(65), row(65), {count(65)}, {0.5}, {{16}}},
      {"E48", row(97), row(97), {count(97)}, {0.5}, {{24}}},
      {"E49", zeros_but(33, 32, 1000), row(33), {count(33)}, {1}, {{16}}},
      {"E50", {}, {}, {{}}, {0.5}, {{0}}},
  };
  const auto add = [&c](edge_case e, auto&& set) {
    set(e);
    c.push_back(std::move(e));
  };
  const auto hide = [](edge_case& e, std::vector<row> keys) { e.hidden[0] = e.hidden[1] = std::move(keys); };
  const auto exact = [](edge_case& e) { e.exact = true; };
  add({"E03", {0, ln3}, {0, ln3}, {{4, 8}}, {1}, {{0}}}, exact);
  for (const diffattn::norm_kind kind : {diffattn::norm_kind::rms, diffattn::norm_kind::group})
    add({"E03 after the norm", {0, ln3}, {0, ln3}, {{4, 8}}, {1}, {{0}}},
        [kind](edge_case& e) { e.exact = true, e.norm = kind; });
  add({"E35", {0, 0}, {0, 0}, {{4, 8}}, {0.5}, {{3}, {nan}}}, [](edge_case& e) { e.q1 = {1, nan}, e.q2 = {1, 1}; });
  add({"E36", {0, 0}, {0, 0}, {{4, 8}}, {0.5}, {{nan}, {3}}}, [](edge_case& e) { e.q1 = {1, 1}, e.q2 = {nan, 1}; });
  // Logits of 1e5 carry a rounding of 2^-24 of that, where the keys lie in different tiles.
  add({"E42", {1e5, 1e5}, {-1e5, -1e5}, {{2, 9}}, {2}, {{-5.5}}}, [](edge_case& e) { e.amplification = 1000; });
  add({"E10", {0, ln3 / 2}, {0, 0}, {{4, 8}}, {1}, {{1}}}, [](edge_case& e) { e.repeat = 4, e.scale = 0.5; });
  add({"E10 with the scale by default", {0, ln3 / 2}, {0, 0}, {{4, 8}}, {1}, {{1}}},
      [](edge_case& e) { e.repeat = 4, e.scale = 0; });

  const auto causal = [](edge_case& e) { e.causal = true; };
  add({"E11", row(3), row(3), {{3, 6, 9}}, {0.5}, {{1.5}, {2.25}, {3}}}, causal);
  add({"E12", zero4, zero4, {one_to_six}, {0}, {{2}, {3}}}, causal);
  add({"E13", zero4, zero4, {one_to_six}, {0.5}, {{1.5}}}, causal);
  add({"E14", {0, 0}, {0, 0}, {{4, 8}}, {0.5}, {{0}, {0}, {2}, {3}}}, causal);
  add({"E15", zero4, zero4, {one_to_six}, {0}, {{1}, {1.5}}}, [](edge_case& e) { e.causal = true, e.offset = 0; });
  add({"E16", row(3), row(3), {{3, 6, 9}}, {0.5}, {{3}}}, causal);
  const std::vector<row> windows[] = {
      {{1}, {3}, {5}, {7}}, {{1}, {2}, {4}, {6}}, {{1}, {2}, {3}, {5}}, {{1}, {2}, {3}, {4}}, {{1}, {2}, {3}, {4}}};
  static const char* const window_ids[] = {"E17", "E18", "E19", "E20", "E21"};
  for (int w = 1; w <= 5; ++w)
    add({window_ids[w - 1], zero4, zero4, {odd}, {0}, windows[w - 1]}, [w](edge_case& e) { e.causal = true, e.window = w; });
  add({"E22", row(5), row(5), {{1, 3, 6, 9, 12}}, {0}, {{6}, {9}}}, [](edge_case& e) { e.causal = true, e.window = 3; });
  add({"E24", row(33), row(33), {count(33)}, {0}, {{32}}}, [](edge_case& e) { e.causal = true, e.window = 1; });
  for (const diffattn::norm_kind kind : {diffattn::norm_kind::none, diffattn::norm_kind::rms, diffattn::norm_kind::group})
    add({"E25", {0, 1}, {1, 0}, {{4, 8}}, {0.5}, {{0}}}, [&, kind](edge_case& e) {
      hide(e, {{1, 1}}), e.norm = kind, e.exact = true, e.lse = {-infinity, -infinity};
    });
  add({"E23", zero4, zero4, {odd}, {0}, {{1}, {1}, {0}, {7}}}, [&](edge_case& e) {
    hide(e, {{0, 1, 1, 0}}), e.causal = true, e.window = 2;
  });
  add({"E26", {0, 0}, {0, 0}, {{4, 8}}, {0.5}, {{0}, {3}, {0}, {0}}}, [&](edge_case& e) {
    hide(e, {{1, 1}, {0, 0}, {1, 1}, {1, 1}});
  });
  add({"E27", {0, 0}, {0, ln3}, {{4, 8}}, {0.5}, {{-3.5}}}, [](edge_case& e) {
    e.hidden[0] = {{1, 1}}, e.lse = {-infinity, std::log(4.0)};
  });
  add({"E28", {0, 0}, {0, ln3}, {{4, 8}}, {0.5}, {{6}}}, [](edge_case& e) {
    e.hidden[1] = {{1, 1}}, e.lse = {std::log(2.0), -infinity};
  });
  // A logit of -inf leaves a key no weight, just as a mask does.
  add({"E27 by logits", {-infinity, -infinity}, {0, ln3}, {{4, 8}}, {0.5}, {{-3.5}}}, [](edge_case&) {});
  add({"E28 by logits", {0, 0}, {-infinity, -infinity}, {{4, 8}}, {0.5}, {{6}}}, [](edge_case&) {});
  add({"E29", {0, ln3}, {0, ln3}, {{4, 8}}, {0.5}, {{3}}}, [](edge_case& e) { e.bias = row(2, -3.4028234663852886e38); });
  add({"E30", {0, ln3, 0}, {0, 0, 0}, {{4, 8, 100}}, {1}, {{1}}}, [&](edge_case& e) { hide(e, {{0, 0, 1}}); });
  add({"E31", {0, 0}, {0, 0}, {{4, 8}}, {0}, {{0}, {8}}}, [&](edge_case& e) { hide(e, {{1, 0}}), e.causal = true; });
  add({"E32", {0, nan}, {0, nan}, {{2, 9}}, {0.5}, {{1}}}, [&](edge_case& e) { hide(e, {{0, 1}}); });
  add({"E33", {0, 0}, {0, 0}, {{2, infinity}}, {0.5}, {{1}}}, [&](edge_case& e) { hide(e, {{0, 1}}); });
  add({"E34", {0, nan}, {0, nan}, {{2, nan}}, {0.5}, {{1}, {nan}}}, causal);

  add({"E51", {0, ln3}, {0, 0}, {{0, 0}}, {0.5}, {{0}}}, [](edge_case& e) { e.lse = {std::log(4.0), std::log(2.0)}; });
  add({"E51 of 33 keys", row(33), row(33), {row(33)}, {0.5}, {{0}}}, [](edge_case& e) {
    e.lse = {std::log(33.0), std::log(33.0)};
  });
  add({"E52", {0, 1000}, {0, 0}, {{2, 9}}, {0}, {{9}}}, [](edge_case& e) { e.lse = {1000, std::log(2.0)}; });
  add({"E69", {0, ln2}, {0, 0}, {{4, 8}}, {0.5}, {{2}}}, [](edge_case& e) {
    e.sinks[0] = 0, e.lse = {std::log(4.0), std::log(2.0)};
  });
  add({"E70", {0, ln2}, {0, 0}, {{4, 8}}, {0.5}, {{0}}}, [&](edge_case& e) {
    hide(e, {{1, 1}}), e.sinks[0] = 0, e.exact = true, e.lse = {0, -infinity};
  });
  add({"E71", {0, 1e4, 5}, {0, 0, 0}, {{0, 1, 1000}}, {0}, {{1 / (1 + std::exp(-1.0))}}}, [&](edge_case& e) {
    hide(e, {{0, 0, 1}}), e.cap = 1;
  });

  // The difference itself, from one key with λ = 0; then the norm.
  const auto norm_of = [&add](const char* id, row difference, row expected, row weight, double gain, double eps) {
    std::vector<row> v;
    for (const double x : difference) v.push_back({x});
    add({id, {0}, {0}, v, {0}, {expected}},
        [&](edge_case& e) { e.norm = diffattn::norm_kind::rms, e.weight = weight, e.gain = gain, e.eps = eps; });
  };
  const double e61 = 0.8 / std::sqrt(12.5 + 1e-5);
  norm_of("E61", {3, 4}, {3 * e61, 8 * e61}, {1, 2}, 0.8, 1e-5);
  const double e62 = 1e-3 / std::sqrt(1.1e-5), e62b = 1e-3 / std::sqrt(2e-6);
  norm_of("E62", {1e-3, 1e-3}, {e62, e62}, {1, 1}, 1, 1e-5);
  norm_of("E62 with eps 1e-6", {1e-3, 1e-3}, {e62b, e62b}, {1, 1}, 1, 1e-6);
  const double e63 = 1e-25 / std::sqrt(1e-5);
  norm_of("E63", {1e-25, 1e-25}, {e63, e63}, {1, 1}, 1, 1e-5);
  norm_of("E64", {3e20, 4e20}, {3 / std::sqrt(12.5), 4 / std::sqrt(12.5)}, {1, 1}, 1, 1e-5);
  norm_of("E65", {0, 0}, {0, 0}, {1, 2}, 1, 1e-5);
  add({"E66", {0, ln3}, {0, ln3}, {{4, 8}}, {1 - 1.0 / 1024}, {{7.0 / 1024 / std::sqrt(49.0 / 1024 / 1024 + 1e-5)}}},
      [](edge_case& e) {
        // y = x / √(x² + eps), so dy/dx = eps / (x² + eps)^1.5 = 23 at x = 7/1024.
        e.norm = diffattn::norm_kind::rms, e.amplification = 23;
      });
  return c;
}

/// Can T hold all inputs of a case? (Parameters are numbers of the computing type.)
template <class T>
bool holds(const edge_case& e) {
  bool all = true;
  const auto look = [&all](const row& r) {
    for (const double x : r) all &= std::isnan(x) || test::number(test::element<T>(x)) == x;
  };
  for (const row* r : {&e.k1, &e.k2, &e.q1, &e.q2}) look(*r);
  for (const row& r : e.v) look(r);
  return all;
}

/// The ways to say which keys are hidden.
enum class saying { key_ranges, bias, visible, blocks, predicate, predicate_with_tiles };
constexpr saying sayings[] = {saying::key_ranges, saying::bias,      saying::visible,
                              saying::blocks,     saying::predicate, saying::predicate_with_tiles};

/// Where a case stands: zero channels up to width `pad`, query rows that see other things, and hidden keys full of NaN.
struct placement {
  index_t pad, rows_before, rows_after, keys_before, keys_behind;
};

std::vector<placement> placements() {
  const index_t pads[] = {1, 8, 16, 33}, after[] = {0, 1, 20}, few[] = {0, 1, 31, 0, 32, 0, 33},
                keys[] = {0, 1, 31, 32, 33, 127, 128, 1023, 1024};
  std::vector<placement> all;
  std::size_t n = 0;
  for (const index_t before : {0, 1, 7, 8, 9, 15, 16, 17, 30, 31, 32, 33, 63, 64})
    all.push_back({pads[n % 4], before, after[n % 3], few[n % 7], few[n % 5]}), ++n;
  for (const index_t before : keys) all.push_back({pads[n % 4], before % 4, after[n % 2], before, keys[n % 5]}), ++n;
  for (const index_t behind : keys) all.push_back({pads[n % 4], behind % 5, after[n % 2], keys[n % 5], behind}), ++n;
  return all;
}

/// A case in its place: one call, whose restrictions can be said in every way.
template <class T>
class placed {
 public:
  using real = diffattn::compute_type<T>;

  placed(const edge_case& e, const placement& p) : e_(e), p_(p) {
    const auto size = [](const auto& v) { return static_cast<index_t>(v.size()); };
    rows_ = size(e.expected), keys_ = size(e.k1), channels_ = size(e.v);
    q_len_ = p.rows_before + rows_ + p.rows_after, kv_len_ = p.keys_before + keys_ + p.keys_behind;
    const index_t d = e.scale == 0 ? e.repeat : std::max(p.pad, e.repeat);
    // Zero channels would count in a norm.
    dv_ = e.norm == diffattn::norm_kind::none ? std::max(p.pad, channels_) : channels_;
    const auto make = [](std::vector<T>& to, index_t n) { to.resize(static_cast<std::size_t>(n)); };
    make(q_, q_len_ * 2 * d), make(k_, kv_len_ * 2 * d), make(v_, kv_len_ * dv_), make(out_, q_len_ * dv_);
    lambda_.assign(static_cast<std::size_t>(q_len_), real(0.5)), weight_.assign(e.weight.begin(), e.weight.end());
    for (std::vector<real>& l : lse_) l.resize(static_cast<std::size_t>(q_len_));
    const auto set = [](std::vector<T>& to, index_t at, double x) { to[static_cast<std::size_t>(at)] = test::element<T>(x); };
    for (index_t i = 0; i < q_len_; ++i) {
      const auto r = static_cast<std::size_t>(i - p.rows_before);
      for (index_t c = 0; c < e.repeat; ++c) {
        set(q_, (i * 2) * d + c, !is_own(i) ? 0.25 : e.q1.empty() ? 1 : e.q1[r]);
        set(q_, (i * 2 + 1) * d + c, !is_own(i) ? -0.5 : e.q2.empty() ? 1 : e.q2[r]);
      }
      if (is_own(i)) lambda_[static_cast<std::size_t>(i)] = static_cast<real>(e.lambda.size() == 1 ? e.lambda[0] : e.lambda[r]);
    }
    for (index_t j = 0; j < kv_len_; ++j) {
      const index_t key = j - p.keys_before;
      const bool is_key = key >= 0 && key < keys_;
      const auto n = static_cast<std::size_t>(key);
      for (index_t c = 0; c < e.repeat; ++c)
        set(k_, (j * 2) * d + c, is_key ? e.k1[n] : nan), set(k_, (j * 2 + 1) * d + c, is_key ? e.k2[n] : nan);
      for (index_t c = 0; c < channels_; ++c) set(v_, j * dv_ + c, is_key ? e.v[static_cast<std::size_t>(c)][n] : nan);
    }
    args_.q = diffattn::view<const T>(q_.data(), 1, q_len_, 2, d),
    args_.k = diffattn::view<const T>(k_.data(), 1, kv_len_, 2, d);
    args_.v = diffattn::view<const T>(v_.data(), 1, kv_len_, 1, dv_),
    args_.out = diffattn::view(out_.data(), 1, q_len_, 1, dv_);
    args_.heads = head_map::interleaved(1, 1);
    args_.lambda = diffattn::lambda_view<real>::per_token(lambda_.data(), q_len_, 1);
    args_.norm.kind = e.norm, args_.norm.eps = static_cast<real>(e.eps), args_.norm.gain = static_cast<real>(e.gain);
    if (!weight_.empty()) args_.norm.weight = weight_.data();
    args_.scale = static_cast<real>(e.scale);
    args_.mask.causal = e.causal, args_.mask.window = e.window;
    args_.mask.offset = (e.offset == attention_mask::align_to_end ? keys_ - rows_ : e.offset) + p.keys_before - p.rows_before;
    args_.lse1 = {lse_[0].data(), q_len_, 1, 1}, args_.lse2 = {lse_[1].data(), q_len_, 1, 1};
    find_expected();
  }
  placed(const placed&) = delete;

  const diffattn::forward_args<T>& args() const { return args_; }

  /// Says what is hidden. False if it cannot be said that way.
  bool say(saying how) {
    range_ = {0, kv_len_};
    for (std::size_t m = 0; m < 2; ++m) rules_[m] = {};
    if (how == saying::key_ranges && !find_range()) return false;
    args_.mask.key_ranges = how == saying::key_ranges ? &range_ : nullptr;
    for (std::size_t m = 0; m < 2; ++m) {
      diffattn::logit_rules<real>& r = rules_[m];
      r.soft_cap = static_cast<real>(e_.cap);
      sinks_[m] = static_cast<real>(e_.sinks[m]), r.sinks = e_.sinks[m] == -infinity ? nullptr : sinks_ + m;
      if (how == saying::bias || !e_.bias.empty()) {
        fill(bias_[m], [&](index_t i, index_t j) {
          const index_t key = j - p_.keys_before;
          if (how == saying::bias && hides(m, i, j)) return -std::numeric_limits<real>::infinity();
          return is_own(i) && !e_.bias.empty() && key >= 0 && key < keys_
                     ? static_cast<real>(e_.bias[static_cast<std::size_t>(key)])
                     : real(0);
        });
        r.bias = {bias_[m].data(), 0, 0, kv_len_, 1};
      }
      if (how == saying::visible) {
        fill(visible_[m], [&](index_t i, index_t j) { return static_cast<unsigned char>(hides(m, i, j) ? 0 : 1 + j % 255); });
        r.visible = {visible_[m].data(), 0, 0, kv_len_, 1};
      }
      if (how == saying::blocks) {
        begins_[m] = {0}, listed_[m].clear();
        for (index_t i = 0; i < q_len_; ++i) {
          for (index_t j = 0; j < kv_len_; ++j)
            if (!hides(m, i, j)) listed_[m].push_back(j);
          begins_[m].push_back(static_cast<index_t>(listed_[m].size()));
        }
        listed_[m].push_back(0);  // data() of an empty vector may be null
        r.blocks = {1, 1, begins_[m].data(), listed_[m].data(), 0, 0};
      }
      if (how == saying::predicate || how == saying::predicate_with_tiles) {
        contexts_[m] = {this, m};
        r.predicate.context = contexts_ + m, r.predicate.sees = sees;
        r.predicate.tile = how == saying::predicate ? nullptr : sees_tile;
      }
    }
    const bool differ = e_.hidden[0] != e_.hidden[1] || e_.sinks[0] != e_.sinks[1];
    args_.logits = rules_[0], args_.logits_2 = differ ? rules_ + 1 : nullptr;
    return true;
  }

  void expect(const diffattn::forward_args<T>& way) {
    std::fill(out_.begin(), out_.end(), test::element<T>(-77));
    const status s = test::run(way);
    ASSERT_EQ(s, status::ok) << message(s);
    expect_results(0);
  }

  /// The keys in two parts, and what they give merged. A sink belongs to one part.
  void expect_merged(diffattn::forward_args<T> way, index_t cut) {
    SCOPED_TRACE("merged parts, cut at " + std::to_string(cut));
    const key_range ranges[2] = {{range_.begin, std::clamp(cut, range_.begin, range_.end)},
                                 {std::clamp(cut, range_.begin, range_.end), range_.end}};
    diffattn::logit_rules<real> second = rules_[1];
    std::vector<real> raw[2][2], lse[2][2];
    std::vector<diffattn::attention_part<real>> parts;
    for (int part = 0; part < 2; ++part) {
      way.mask.key_ranges = ranges + part;
      if (part == 1) way.logits.sinks = second.sinks = nullptr, way.logits_2 = way.logits_2 ? &second : nullptr;
      for (std::size_t m = 0; m < 2; ++m) raw[part][m].resize(out_.size()), lse[part][m].resize(lse_[0].size());
      way.out1 = diffattn::view(raw[part][0].data(), 1, q_len_, 1, dv_);
      way.out2 = diffattn::view(raw[part][1].data(), 1, q_len_, 1, dv_);
      way.lse1.data = lse[part][0].data(), way.lse2.data = lse[part][1].data();
      const status s = test::run(way);
      ASSERT_EQ(s, status::ok) << message(s);
      parts.push_back({way.out1, way.out2, {way.lse1.data, q_len_, 1, 1}, {way.lse2.data, q_len_, 1, 1}});
    }
    std::fill(out_.begin(), out_.end(), test::element<T>(-77));
    diffattn::merge_args<T> merge;
    merge.parts = parts.data(), merge.count = 2, merge.out = args_.out, merge.lambda = args_.lambda, merge.norm = args_.norm;
    merge.lse1 = args_.lse1, merge.lse2 = args_.lse2;
    ASSERT_EQ(test::run(merge), status::ok);
    // A part's share errs by its log-sum-exp times a rounding.
    double largest = 0;
    for (const row* r : {&e_.k1, &e_.k2})
      for (const double x : *r)
        if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
    expect_results(largest);
  }

  /// From a cache of another storage, if that holds the case's numbers but for a rounding of float.
  void expect_from(storage type, const test::cache_choice& choice) {
    SCOPED_TRACE(std::string(test::name(type)) + ", " + choice.text());
    diffattn::kv_cache_config config;
    config.heads = args_.heads, config.key_width = args_.k.width, config.value_width = args_.v.width;
    config.keys = config.values = type, config.kind = choice.kind, config.page_tokens = choice.page_tokens;
    config.sequences = 1, config.capacity = std::max(kv_len_, index_t{1});
    test::owned_cache cache(config);
    cache.append(0, args_.k, args_.v, 0, 0, kv_len_);
    const auto same = [&](const diffattn::kv_rows& rows, const diffattn::tensor_view<const T>& x) {
      bool all = true;
      for (index_t j = p_.keys_before; j < p_.keys_before + keys_; ++j)
        for (index_t h = 0; h < x.heads; ++h)
          for (index_t c = 0; c < x.width; ++c) {
            const double a = test::number(x.at(0, j, h)[c]);
            const double b = test::stored_number(type, test::stored_row(cache->view(), rows, 0, j, h), c);
            all &= std::isfinite(a) ? std::fabs(a - b) <= std::fabs(a) * 0x1p-22 : std::isnan(a) ? std::isnan(b) : a == b;
          }
      return all;
    };
    if (!same(cache->view().keys, args_.k) || !same(cache->view().values, args_.v)) return;
    diffattn::forward_args<T> way = args_;
    way.k = way.v = {}, way.cache = cache->view();
    for (const schedule_choice schedule : test::both_schedules) {
      SCOPED_TRACE(test::name(schedule));
      way.schedule = schedule;
      expect(way);
    }
  }

 private:
  struct context {
    const placed* self;
    std::size_t map;
  };

  bool is_own(index_t i) const { return i >= p_.rows_before && i < p_.rows_before + rows_; }
  bool hides(std::size_t m, index_t i, index_t j) const {
    if (!is_own(i)) return (i + j) % 3 == 0;
    const index_t key = j - p_.keys_before;
    if (key < 0 || key >= keys_) return true;
    const std::vector<row>& h = e_.hidden[m];
    return !h.empty() &&
           h[h.size() == 1 ? 0 : static_cast<std::size_t>(i - p_.rows_before)][static_cast<std::size_t>(key)] != 0;
  }
  static bool sees(const void* c, index_t, index_t, index_t i, index_t j) {
    const context& at = *static_cast<const context*>(c);
    return !at.self->hides(at.map, i, j);
  }
  static sight sees_tile(const void* c, index_t b, index_t h, index_t first, index_t last, key_range keys) {
    bool some = false, all = true;
    for (index_t i = first; i <= last; ++i)
      for (index_t j = keys.begin; j < keys.end; ++j) (sees(c, b, h, i, j) ? some : all) = sees(c, b, h, i, j);
    return all ? sight::all : some ? sight::some : sight::none;
  }

  /// The one interval of keys that both maps and all rows see, if it is one.
  bool find_range() {
    const std::vector<row>& h = e_.hidden[0];
    if (h != e_.hidden[1] || h.size() > 1) return false;
    range_ = {p_.keys_before, p_.keys_before + keys_};
    if (h.empty()) return true;
    const auto is_hidden = [&](index_t j) { return h[0][static_cast<std::size_t>(j - p_.keys_before)] != 0; };
    while (range_.begin < range_.end && is_hidden(range_.begin)) ++range_.begin;
    while (range_.begin < range_.end && is_hidden(range_.end - 1)) --range_.end;
    for (index_t j = range_.begin; j < range_.end; ++j)
      if (is_hidden(j)) return false;
    return true;
  }

  template <class E, class F>
  void fill(std::vector<E>& to, F&& f) const {
    to.clear();
    for (index_t i = 0; i < q_len_; ++i)
      for (index_t j = 0; j < kv_len_; ++j) to.push_back(f(i, j));
    to.push_back(E(0));  // data() of an empty vector may be null
  }

  void find_expected() {
    double largest = 0;  // |result| is at most the largest value times the factors of the maps
    for (const row& channel : e_.v)
      for (const double x : channel)
        if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
    double lambda_size = 0;
    for (const double l : e_.lambda) lambda_size = std::max(lambda_size, std::fabs(l));
    const bool counts = e_.norm == diffattn::norm_kind::none || e_.amplification > 1;
    const double size_of_result = counts ? largest * (1 + lambda_size) * e_.amplification : 0;
    for (const row& channels : e_.expected)
      for (const double x : channels) {
        expected_.push_back(x), size_.push_back(std::isfinite(x) ? std::max(std::fabs(x), size_of_result) : 1);
      }
  }

  /// Sixteen roundings, of the ln 3 in the inputs, the exponentials, the sums and the norm, and more for larger logits if they
  /// are rounded; then that of the output.
  void expect_results(double logits) const {
    std::vector<double> actual, tolerance;
    for (index_t i = 0; i < rows_; ++i) {
      const T* const result = out_.data() + (p_.rows_before + i) * dv_;
      for (index_t c = 0; c < channels_; ++c) actual.push_back(test::number(result[c]));
      for (index_t c = channels_; c < dv_; ++c)
        EXPECT_FALSE(std::isfinite(e_.expected[static_cast<std::size_t>(i)][0]) && test::number(result[c]) != 0);
    }
    for (std::size_t n = 0; n < expected_.size(); ++n) {
      const double rounding =
          test::is_16_bit<T> && std::isfinite(expected_[n]) ? std::fabs(expected_[n]) * test::epsilon<T>() / 2 : 0;
      tolerance.push_back(e_.exact ? 0 : (16 + 2 * logits) * test::epsilon<real>() * size_[n] + rounding);
    }
    EXPECT_TRUE(test::compare(actual, expected_, tolerance, {{{"row", rows_}, {"channel", channels_}}}));
    for (std::size_t m = 0; m < e_.lse.size(); ++m) {
      const double eps = 16 * test::epsilon<real>() * (std::isfinite(e_.lse[m]) ? 1 + std::fabs(e_.lse[m]) : 1);
      EXPECT_TRUE(test::compare<real>({lse_[m][static_cast<std::size_t>(p_.rows_before)]}, {e_.lse[m]}, {eps}))
          << "lse" << m + 1;
    }
  }

  const edge_case& e_;
  placement p_;
  index_t rows_, keys_, channels_, q_len_, kv_len_, dv_;
  std::vector<T> q_, k_, v_, out_;
  std::vector<real> lambda_, weight_, lse_[2];
  key_range range_;
  diffattn::logit_rules<real> rules_[2];
  std::vector<real> bias_[2];
  real sinks_[2];
  std::vector<unsigned char> visible_[2];
  std::vector<index_t> begins_[2], listed_[2];
  context contexts_[2];
  diffattn::forward_args<T> args_;
  std::vector<double> expected_, size_;
};

/// Runs `e` at one place in every way. What takes long is done at some of the places, number n among them.
template <class T>
void verify(const edge_case& e, const placement& p, std::size_t n) {
  SCOPED_TRACE(std::string(e.id) + ", padded to " + std::to_string(p.pad) + ", rows " + std::to_string(p.rows_before) + " + " +
               std::to_string(p.rows_after) + ", keys " + std::to_string(p.keys_before) + " + " +
               std::to_string(p.keys_behind) + ", elements of " + std::to_string(sizeof(T)) + " bytes");
  placed<T> call(e, p);
  std::size_t turn = n;
  for (const saying how : sayings) {
    if (!call.say(how)) continue;
    SCOPED_TRACE("said in way " + std::to_string(static_cast<int>(how)));
    diffattn::forward_args<T> way = call.args();
    for (const schedule_choice schedule : test::both_schedules) {
      SCOPED_TRACE(test::name(schedule));
      way.schedule = schedule;
      call.expect(way);
      if (turn % 3 == 0) call.expect_merged(way, p.keys_before + static_cast<index_t>(e.k1.size()) / 2);
      if (turn % 9 == 0) call.expect_merged(way, p.keys_before);
    }
    if (turn % 11 == 0) test::for_each_way(call.args(), [&](const auto& other) { call.expect(other); });
    if constexpr (!std::is_same_v<T, double>)
      if (turn % 7 == 0)
        for (const storage type : test::float_storages)
          call.expect_from(type, test::all_caches[n % std::size(test::all_caches)]);
    if (testing::Test::HasFailure()) return;
    ++turn;
  }
}

class EdgeCases : public testing::TestWithParam<edge_case> {};

void PrintTo(const edge_case& e, std::ostream* out) {
  *out << e.id;
}

TEST_P(EdgeCases, Row) {
  std::size_t n = 0;
  for (const placement& p : placements()) {
    verify<float>(GetParam(), p, n);
    if (n % 3 == 0) verify<double>(GetParam(), p, n);
    if (n % 4 == 0 && holds<diffattn::f16>(GetParam())) verify<diffattn::f16>(GetParam(), p, n);
    if (n % 4 == 1 && holds<diffattn::bf16>(GetParam())) verify<diffattn::bf16>(GetParam(), p, n);
    if (HasFailure()) return;
    ++n;
  }
}

INSTANTIATE_TEST_SUITE_P(List, EdgeCases, testing::ValuesIn(cases()), [](const testing::TestParamInfo<edge_case>& e) {
  std::string name = e.param.id;
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return name + "_" + std::to_string(e.index);
});

template <class T>
struct Edges : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Edges, types);

TYPED_TEST(Edges, E52_PartsOfTheKeysMerge) {
  using T = TypeParam;
  const T q[] = {1, 1}, k[] = {0, 0, 1000, 0}, v[] = {2, 9};
  for (const bool swapped : {false, true})
    for (const bool empty_part : {false, true}) {
      std::vector<key_range> ranges = {{0, 1}, {1, 2}};
      if (swapped) std::swap(ranges[0], ranges[1]);
      if (empty_part) ranges.insert(ranges.begin(), {1, 1});
      T results[3][4];  // out1, out2, lse1, lse2
      std::vector<diffattn::attention_part<T>> parts;
      for (const key_range& range : ranges) {
        T out[1];
        T* const to = results[parts.size()];
        diffattn::forward_args<T> a;
        a.q = diffattn::view(q, 1, 1, 2, 1), a.k = diffattn::view(k, 1, 2, 2, 1), a.v = diffattn::view(v, 1, 2, 1, 1);
        a.out = diffattn::view(out, 1, 1, 1, 1), a.heads = head_map::interleaved(1, 1), a.lambda = T(0);
        a.scale = 1, a.mask.key_ranges = &range, a.lse1 = {to + 2, 1, 1, 1}, a.lse2 = {to + 3, 1, 1, 1};
        a.out1 = diffattn::view(to, 1, 1, 1, 1), a.out2 = diffattn::view(to + 1, 1, 1, 1, 1);
        ASSERT_EQ(test::run(a), status::ok);
        parts.push_back({a.out1, a.out2, {to + 2, 1, 1, 1}, {to + 3, 1, 1, 1}});
      }
      T out[1], lse[2];
      diffattn::merge_args<T> m;
      m.parts = parts.data(), m.count = static_cast<index_t>(parts.size()), m.out = diffattn::view(out, 1, 1, 1, 1);
      m.norm.kind = diffattn::norm_kind::none, m.lse1 = {lse, 1, 1, 1}, m.lse2 = {lse + 1, 1, 1, 1};
      for (const T lambda : {T(0), T(1)}) {
        m.lambda = lambda;
        diffattn::merge(m);
        EXPECT_EQ(out[0], lambda == T(0) ? T(9) : T(3.5));
      }
      EXPECT_EQ(lse[0], T(1000));
      EXPECT_NEAR(double(lse[1]), std::log(2.0), 4 * test::epsilon<T>());
    }
}

// K has two channels; the queries of map 1 look at the first and those of map 2 at the second, so that both maps can share the
// one key head that all heads share by stride 0.
TYPED_TEST(Edges, E53_E54_StrideZeroHeads) {
  using T = TypeParam;
  struct numbers {
    row k1, k2, v;
    double lambda, expected[2];
  };
  for (const numbers& n :
       {numbers{{0, ln3}, {0, 0}, {4, 8}, 0.5, {4, 3}}, numbers{zeros_but(33, 32, 1000), row(33), count(33), 1, {16, 0}}}) {
    const T q[] = {1, 0, 0, 1, 0, 0, 0, 0};
    std::vector<T> k, v, k_copies, v_copies;
    for (std::size_t j = 0; j < n.v.size(); ++j) {
      k.insert(k.end(), {static_cast<T>(n.k1[j]), static_cast<T>(n.k2[j])});
      v.push_back(static_cast<T>(n.v[j]));
      for (int copy = 0; copy < 2; ++copy) {
        k_copies.insert(k_copies.end(), {static_cast<T>(n.k1[j]), static_cast<T>(n.k2[j])});
        v_copies.push_back(v[j]);
      }
    }
    const index_t keys = static_cast<index_t>(v.size());
    const double eps = 16 * double(std::numeric_limits<T>::epsilon()) * n.v.back();
    std::vector<std::vector<T>> results[2];
    for (const bool copies : {false, true}) {
      std::vector<T> out(2);
      diffattn::forward_args<T> a;
      a.q = diffattn::view(q, 1, 1, 4, 2), a.out = diffattn::view(out.data(), 1, 1, 2, 1);
      if (copies)
        a.k = diffattn::view<const T>(k_copies.data(), 1, keys, 2, 2),
        a.v = diffattn::view<const T>(v_copies.data(), 1, keys, 2, 1);
      else
        a.k = {k.data(), 1, keys, 2, 2, 0, 2, 0, 1}, a.v = {v.data(), 1, keys, 2, 1, 0, 1, 0, 1};
      a.heads = head_map::shared(2, 2), a.lambda = static_cast<T>(n.lambda), a.norm.kind = diffattn::norm_kind::none,
      a.scale = 1;
      test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
        ASSERT_EQ(test::run(way), status::ok);
        EXPECT_TRUE(test::compare(out, {n.expected[0], n.expected[1]}, {eps, eps}));
        results[copies ? 1 : 0].push_back(out);
      });
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

/// One token: a head's output is (1 - λ) times its value.
template <class T>
void expect_of_one_token(const std::vector<double>& expected, const head_map& map, index_t q_heads, index_t k_heads,
                         const std::vector<T>& v, index_t dv, const diffattn::lambda_view<T>& lambda) {
  const std::vector<T> q(static_cast<std::size_t>(q_heads), T(1)), k(static_cast<std::size_t>(k_heads), T(2));
  std::vector<T> out(static_cast<std::size_t>(map.heads * dv));
  diffattn::forward_args<T> a;
  a.q = diffattn::view(q.data(), 1, 1, q_heads, 1), a.k = diffattn::view(k.data(), 1, 1, k_heads, 1);
  a.v = diffattn::view(v.data(), 1, 1, static_cast<index_t>(v.size()), 1),
  a.out = diffattn::view(out.data(), 1, 1, map.heads, dv);
  a.heads = map, a.lambda = lambda, a.norm.kind = diffattn::norm_kind::none, a.mask.causal = true;
  const std::vector<double> tolerance(expected.size(), 40 * 16 * test::epsilon<T>());
  test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
    ASSERT_EQ(test::run(way), status::ok);
    EXPECT_TRUE(test::compare(out, expected, tolerance));
  });
}

TYPED_TEST(Edges, E55_E56_E57_E58_HeadsOfOneToken) {
  using T = TypeParam;
  using values = std::vector<T>;
  const values v = {10, 20, 30, 40};
  const diffattn::lambda_view<T> half = T(0.5);
  expect_of_one_token<T>({5, 10, 5, 10, 15, 20, 15, 20}, head_map::interleaved(4, 2, diffattn::value_layout::adjacent), 8, 4, v,
                         2, half);
  expect_of_one_token<T>({5, 15, 10, 20}, head_map::halves(2, 4), 4, 4, v, 2, half);
  expect_of_one_token<T>({5, 15, 5, 15, 10, 20, 10, 20}, head_map::halves(4, 4), 8, 4, v, 2, half);
  const T logits[] = {0, static_cast<T>(ln3)};
  expect_of_one_token<T>({5, 5}, head_map::shared(2, 2), 4, 2, {10, 20}, 1, diffattn::lambda_view<T>::gate(logits, 1, 2));
}

TYPED_TEST(Edges, E60_OneNoiseHeadForFourSignalHeads) {
  using T = TypeParam;
  const std::vector<T> q = {1, 1, 1, 1, 1, 1, 1, 1, 1, 0};
  const T l = static_cast<T>(ln3), k[] = {0, 0, 0, 0, 0, l, 0, l}, v[] = {4, 4, 8, 8};  // [2 keys][heads]
  std::vector<T> out(8);
  diffattn::forward_args<T> a;
  a.q = diffattn::view<const T>(q.data(), 1, 1, 10, 1), a.k = diffattn::view(k, 1, 2, 4, 1),
  a.v = diffattn::view(v, 1, 2, 2, 1);
  a.out = diffattn::view(out.data(), 1, 1, 8, 1);
  a.heads = head_map::grouped(8, 4, 2, diffattn::value_layout::wide), a.lambda = T(1), a.scale = 1;
  a.norm.kind = diffattn::norm_kind::none;
  test::for_each_way(a, [&](const diffattn::forward_args<T>& way) {
    ASSERT_EQ(test::run(way), status::ok);
    EXPECT_TRUE(test::compare(out, {-1, -1, -1, -1, 0, 0, 0, 0}, std::vector<double>(8, 16 * 8 * test::epsilon<T>())));
  });
}

TYPED_TEST(Edges, E59_PairAcrossTwoGroups) {
  using T = TypeParam;
  const std::vector<T> data(6, T(1));
  std::vector<T> out(3, T(-77));
  diffattn::forward_args<T> a;
  a.q = diffattn::view<const T>(data.data(), 1, 1, 6, 1), a.k = a.v = diffattn::view<const T>(data.data(), 1, 1, 2, 1);
  a.out = diffattn::view(out.data(), 1, 1, 3, 1), a.heads = head_map::shared(3, 2), a.lambda = T(0.5);
  EXPECT_EQ(test::run(a), status::heads_pair_across_kv_groups);
  EXPECT_EQ(out, std::vector<T>(3, T(-77)));
}

TEST(Edge, E67_E68_Lambda) {
  const double layers[] = {-1, 0, 1, 2, 10000}, expected[] = {-0.0099153, 0.2, 0.3555091, 0.4707130, 0.8};
  for (std::size_t i = 0; i < 5; ++i)
    EXPECT_NEAR(diffattn::lambda_init(static_cast<index_t>(layers[i]), diffattn::layer_index::zero_based), expected[i], 1e-7);
  const double q1[] = {ln2}, k1[] = {1}, zero[] = {0};
  EXPECT_NEAR(diffattn::lambda_from_vectors(q1, k1, zero, zero, 1, 0.2), 1.2, 1e-15);
  EXPECT_EQ(diffattn::lambda_from_vectors(zero, zero, zero, zero, 1, 0.2), 0.2);
}

}  // namespace
