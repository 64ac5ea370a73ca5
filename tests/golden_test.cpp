// SPDX-License-Identifier: MIT
// Tensors and results of the published implementations, in their own head order (tests/golden). The library's description of
// each family must say what the files say. The attention calls are run by both schedules, on tensors and from caches; whole
// layers at once and as the authors fed them. The reference of these tests is held to the stored results as well, so that it
// may be trusted elsewhere.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "reference/reference.hpp"
#include "support/calls.hpp"
#include "support/compare.hpp"
#include "support/golden_layer.hpp"
#include "support/ways.hpp"

namespace {

using diffattn::head_indices;
using diffattn::head_map;
using diffattn::index_t;
using diffattn::layer_config;
using diffattn::status;
using test::golden_case;
using test::golden_file;
using test::name;

std::vector<std::string> files() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(DIFFATTN_GOLDEN_DIR))
    if (entry.path().extension() == ".safetensors") found.push_back(entry.path().string());
#if defined(DIFFATTN_REAL_DATA)
  if (std::filesystem::exists(DIFFATTN_REAL_DATA)) found.push_back(DIFFATTN_REAL_DATA);
#endif
  std::sort(found.begin(), found.end());
  return found;
}

template <class T>
test::axes shape(const golden_case<T>& c) {
  return {
      {{"batch", c.batch}, {"row", c.rows}, {"head", c.config.heads.heads}, {"channel", c.file.integer("out_head_dim", 1)}}};
}

/// The result by each schedule, on tensors; caches must not change a bit.
template <class T>
std::vector<std::vector<T>> run(const golden_case<T>& c, const head_map& map, const diffattn::head_norm<T>& norm) {
  std::vector<std::vector<T>> results;
  std::vector<T> out;
  for (diffattn::forward_args<T> a : c.calls(out)) {
    a.heads = map, a.norm = norm;
    std::size_t way = 0;
    test::for_each_way(a, [&](const diffattn::forward_args<T>& call) {
      if (results.size() == way) results.emplace_back(out.size(), std::numeric_limits<T>::quiet_NaN());
      std::fill(out.begin(), out.end(), std::numeric_limits<T>::quiet_NaN());
      const status s = test::run(call);
      EXPECT_EQ(s, status::ok) << message(s);
      const auto rows = call.out.data - out.data(), size = call.out.batch * call.out.tokens * call.out.token_stride;
      std::copy_n(call.out.data, size, results[way++].begin() + rows);
    });
  }
  for (std::size_t way = 2; way < results.size(); ++way)
    EXPECT_TRUE(test::identical(results[way], results[way % 2], shape(c))) << "cache " << way;
  results.resize(2);
  return results;
}

template <class T>
reference::result reference_result(const golden_case<T>& c) {
  reference::result all;
  std::vector<T> out;
  for (const diffattn::forward_args<T>& a : c.calls(out)) {
    reference::problem<T> p;
    const auto strides = [](const auto& t) {
      return reference::tensor<T>{t.data, t.batch_stride, t.token_stride, t.head_stride};
    };
    p.batch = a.q.batch, p.q_len = a.q.tokens, p.kv_len = a.k.tokens, p.d = a.q.width, p.dv = a.out.width;
    p.q = strides(a.q), p.k = strides(a.k), p.v = strides(a.v), p.scale = c.file.number("scale");
    for (const head_indices& h : c.heads) p.heads.push_back({{h.query_1, h.query_2}, {h.key_1, h.key_2}, h.value_1, h.value_2});
    const std::vector<double>& stored = c.file["kernel.lambda"].values;
    const std::size_t coefficients = static_cast<std::size_t>(p.batch * p.q_len) * c.heads.size();
    p.factor[0].assign(coefficients, 1), p.factor[1].assign(coefficients, stored[0]);
    if (stored.size() > 1) p.factor[1] = stored;
    p.causal = c.file.text("causal") == "true", p.offset = p.kv_len - p.q_len;
    p.window = std::max(0L, static_cast<long>(c.file.integer("window", -1)));
    for (const diffattn::key_range& r : c.ranges) p.first.push_back(r.begin), p.last.push_back(r.end);
    p.kind = c.file.text("norm") == "none" ? reference::norm::none : reference::norm::rms;
    p.eps = c.file.number("eps"), p.gain = c.file.number("out_scale");
    if (c.file.has("kernel.norm_weight")) p.weight = c.file["kernel.norm_weight"].values;
    const reference::result r = reference::attention(p);
    const auto append = [](reference::numbers& to, const reference::numbers& from) {
      to.value.insert(to.value.end(), from.value.begin(), from.value.end());
      to.error.insert(to.error.end(), from.error.begin(), from.error.end());
    };
    append(all.out, r.out), append(all.diff, r.diff);
  }
  return all;
}

template <class T>
std::vector<double> as_double(const std::vector<T>& v) {
  return std::vector<double>(v.begin(), v.end());
}

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, HeadMapsAgree) {
  const golden_file f(GetParam());
  const std::vector<head_indices> listed = test::listed_heads(f);
  const layer_config said = test::described_layer(f, listed);
  const std::optional<layer_config> family = test::family_layer(f, said);
  ASSERT_TRUE(family) << f.text("implementation");
  EXPECT_NO_THROW(test::expect_agreement(f, *family, said));
  for (const head_map& map : {test::named_heads(f), said.heads, family->heads}) {
    ASSERT_EQ(static_cast<std::size_t>(map.heads), listed.size());
    for (std::size_t h = 0; h < listed.size(); ++h) {
      const head_indices a = map[static_cast<index_t>(h)], b = listed[h];
      EXPECT_EQ(std::vector<index_t>({a.query_1, a.query_2, a.key_1, a.key_2, a.value_1, a.value_2}),
                std::vector<index_t>({b.query_1, b.query_2, b.key_1, b.key_2, b.value_1, b.value_2}))
          << "head " << h;
    }
  }
}

// Stored results were recomputed by their makers to 1.6e-13 (the nearly cancelling case), this is a third computation.
TEST_P(Golden, ReferenceAgrees) {
  const golden_case<double> c(GetParam());
  const reference::result r = reference_result(c);
  const std::vector<double> tolerance(r.out.value.size(), 1e-12);
  EXPECT_TRUE(test::compare(r.out.value, c.expected("kernel.out", r.out.value, false), tolerance, shape(c)));
  if (c.file.has("kernel.diff")) {
    EXPECT_TRUE(test::compare(r.diff.value, c.expected("kernel.diff", r.diff.value, false), tolerance, shape(c)));
  }
}

/// Double is better by 2^-29, down to the accuracy of the stored numbers.
template <class T>
double tolerance(const golden_file& f, const char* result) {
  const double allowed = test::tolerance_of(f, result);
  return sizeof(T) == 8 ? allowed * 0x1p-29 + 2e-13 : allowed;
}

template <class T>
void verify(const std::string& path) {
  const golden_case<T> c(path);
  const head_map listed = head_map::table(c.heads.data(), static_cast<index_t>(c.heads.size()));
  const std::vector<std::vector<T>> out = run(c, listed, c.args.norm), by_name = run(c, c.config.heads, c.args.norm);
  const bool cancels = path.find("near_cancel") != std::string::npos, peaky = path.find("peaky") != std::string::npos;
  for (const double allowed : {4 * c.file.number("ref_f32_kernel_diff"), test::tolerance_of(c.file, "kernel.out")})
    EXPECT_LE(allowed, cancels ? 3e-4 : peaky ? 2e-5 : 8e-6) << "the stored tolerance is wrong";
  for (std::size_t schedule = 0; schedule < 2; ++schedule) {
    SCOPED_TRACE(name(test::both_schedules[schedule]));
    const std::vector<double> expected = c.expected("kernel.out", as_double(out[schedule]), false);
    const std::vector<double> allowed(expected.size(), tolerance<T>(c.file, "kernel.out"));
    EXPECT_TRUE(test::compare(out[schedule], expected, allowed, shape(c))) << "out";
    EXPECT_TRUE(test::identical(by_name[schedule], out[schedule], shape(c))) << "named head map";
  }

  if (!c.file.has("kernel.diff")) return;
  const reference::result r = reference_result(c);
  std::vector<double> bound;
  for (const double e : r.diff.error)
    bound.push_back(std::min(e * double(std::numeric_limits<T>::epsilon()) / 2 + 2e-13, cancels ? 3e-6 : 8e-6));
  for (const std::vector<T>& diff : run(c, c.config.heads, diffattn::head_norm<T>::none()))
    EXPECT_TRUE(test::compare(diff, c.expected("kernel.diff", as_double(diff), false), bound, shape(c))) << "diff";
}

/// One level of a file: at once and as the authors' caches were fed, rows of padding included.
template <class T, class Level>
void verify_level(const golden_case<T>& c, const Level& level) {
  const auto expect_stored = [&](const std::vector<T>& found, const char* how) {
    const std::vector<double> expected = c.expected(level.result(), as_double(found));
    const std::vector<double> allowed(expected.size(), tolerance<T>(c.file, level.result()));
    EXPECT_TRUE(test::compare(found, expected, allowed)) << level.result() << ' ' << how;
  };
  expect_stored(level.run(), "at once");
  if (!c.pieces.empty()) expect_stored(level.replay(), "in pieces");
}

template <class T>
void verify_levels(const std::string& path) {
  golden_case<T> c(path);
  verify_level(c, c);
  if (c.file.has("layer.x"))
    verify_level(c, test::golden_layer<T>(c));
  else
    EXPECT_THROW(test::golden_layer<T>{c}, llm::load_error);
}

/// Feeds a case through a cache in pieces of the given sizes; no row may change.
template <class T>
void expect_same_in_pieces(const golden_case<T>& c, const std::vector<index_t>& pieces, const test::cache_choice& choice) {
  const std::vector<std::vector<T>> expected = run(c, c.config.heads, c.args.norm);
  const index_t first_row = c.keys - c.rows;
  diffattn::kv_cache_config config = c.cache_config();
  config.kind = choice.kind, config.page_tokens = choice.page_tokens;
  if (choice.kind == test::kv_cache_kind::ring && c.args.mask.window > 0)
    config.capacity = c.args.mask.window + *std::max_element(pieces.begin(), pieces.end()) - 1;
  for (std::size_t schedule = 0; schedule < 2; ++schedule) {
    SCOPED_TRACE(choice.text() + ", " + name(test::both_schedules[schedule]));
    std::vector<T> out;
    const diffattn::forward_args<T> whole = c.calls(out)[0];
    std::fill(out.begin(), out.end(), std::numeric_limits<T>::quiet_NaN());
    test::owned_cache cache(config);
    index_t begin = 0;
    for (const index_t piece : pieces) {
      const index_t end = begin + piece, row = begin - first_row;
      for (index_t b = 0; b < c.batch; ++b) cache.append(b, c.args.k, c.args.v, b, begin, end);
      begin = end;
      if (row < 0) continue;  // a prefix whose results nobody kept
      diffattn::forward_args<T> a = test::on_rows(whole, row, piece);
      a.k = a.v = {}, a.cache = cache->view(), a.schedule = test::both_schedules[schedule];
      ASSERT_EQ(test::run(a), status::ok);
    }
    ASSERT_EQ(begin, c.keys);
    EXPECT_TRUE(test::identical(out, expected[schedule], shape(c)));
  }
}

// Token by token, all stored rows at once, and as the authors' caches were fed ("6,1,1,1,1,1,1,1").
TEST_P(Golden, InPiecesFromCaches) {
  const golden_case<float> c(GetParam());
  if (!c.config.causal || !c.ranges.empty() || c.is_packed()) return;
  std::vector<std::vector<index_t>> ways(2, {c.keys - c.rows});
  ways[0].resize(1 + static_cast<std::size_t>(c.rows), 1), ways[1].push_back(c.rows);
  if (ways[0][0] == 0)
    for (std::vector<index_t>& pieces : ways) pieces.erase(pieces.begin());
  if (!c.pieces.empty() && !c.is_paged) ways.push_back(c.pieces[0]);
  for (const std::vector<index_t>& pieces : ways)
    for (const test::cache_choice& choice : test::all_caches) expect_same_in_pieces(c, pieces, choice);
}

// The sequences of a packed file as they were run: each with its prefix in pages of one pool.
TEST(GoldenFiles, PackedSequencesShareAPool) {
  const golden_case<float> c(std::string(DIFFATTN_GOLDEN_DIR) + "/motif2_gda_packed.safetensors");
  const std::vector<std::vector<float>> expected = run(c, c.config.heads, c.args.norm);
  std::vector<float> out;
  const std::vector<diffattn::forward_args<float>> calls = c.calls(out);
  for (const index_t page_tokens : {1, 16, 64})
    for (std::size_t schedule = 0; schedule < 2; ++schedule) {
      diffattn::kv_cache_config config = c.cache_config();
      config.kind = test::kv_cache_kind::paged, config.page_tokens = page_tokens, config.sequences = 3, config.capacity = 34;
      test::owned_cache cache(config);
      for (index_t begin = 0; begin < 34; begin += 5)
        for (index_t i = 0; i < 3; ++i) {
          const diffattn::forward_args<float>& a = calls[static_cast<std::size_t>(i)];
          if (begin < a.k.tokens) cache.append(i, a.k, a.v, 0, begin, std::min(begin + 5, a.k.tokens));
        }
      std::fill(out.begin(), out.end(), std::numeric_limits<float>::quiet_NaN());
      for (index_t i = 0; i < 3; ++i) {
        diffattn::forward_args<float> a = calls[static_cast<std::size_t>(i)];
        a.k = a.v = {}, a.cache = cache->view(), a.sequences = &i, a.schedule = test::both_schedules[schedule];
        ASSERT_EQ(test::run(a), status::ok);
      }
      EXPECT_TRUE(test::identical(out, expected[schedule], shape(c))) << page_tokens << " tokens a page";
    }
}

TEST_P(Golden, Float) {
  verify<float>(GetParam());
  verify_levels<float>(GetParam());
}
TEST_P(Golden, Double) {
  verify<double>(GetParam());
  verify_levels<double>(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Files, Golden, testing::ValuesIn(files()), [](const testing::TestParamInfo<std::string>& path) {
  return std::filesystem::path(path.param).stem().string();
});

TEST(GoldenFiles, AllAreThere) {
  EXPECT_GE(files().size(), 29u);
}

}  // namespace
