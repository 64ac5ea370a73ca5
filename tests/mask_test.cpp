// SPDX-License-Identifier: MIT
// The interval of visible keys against the definition, key by key.

#include <gtest/gtest.h>

#include <diffattn/mask.hpp>
#include <limits>
#include <string>
#include <vector>

#include "support/random.hpp"

namespace {

using diffattn::attention_mask;
using diffattn::index_t;
using diffattn::key_range;

constexpr index_t largest = std::numeric_limits<index_t>::max();

/// The definition, in wide enough numbers. Packed: that of the one sequence that the row is in, on its own keys.
bool sees(const attention_mask& m, index_t q_len, index_t kv_len, index_t b, index_t row, index_t key) {
  if (m.query_starts) {
    index_t s = 0;
    while (row >= m.query_starts[s + 1]) ++s;
    if (key < m.key_starts[s] || key >= m.key_starts[s + 1]) return false;
    attention_mask alone = m;
    alone.query_starts = alone.key_starts = nullptr, alone.sequences = 0;
    const index_t queries = m.query_starts[s + 1] - m.query_starts[s], keys = m.key_starts[s + 1] - m.key_starts[s];
    return sees(alone, queries, keys, s, row - m.query_starts[s], key - m.key_starts[s]);
  }
  if (m.key_ranges && (key < m.key_ranges[b].begin || key >= m.key_ranges[b].end)) return false;
  if (!m.causal) return true;
  const double own =
      static_cast<double>(row) + static_cast<double>(m.offset == attention_mask::align_to_end ? kv_len - q_len : m.offset);
  const double k = static_cast<double>(key);
  return (k <= own || (m.prefixes && key < m.prefixes[b])) &&
         (m.window == attention_mask::unlimited || own - k < static_cast<double>(m.window));
}

void expect_as_defined(const attention_mask& m, index_t q_len, index_t kv_len, index_t b) {
  key_range before{0, 0};
  for (index_t row = 0; row < q_len; ++row) {
    const key_range keys = visible_keys(m, q_len, kv_len, b, row);
    const auto text = [&] {
      return "row " + std::to_string(row) + " of " + std::to_string(q_len) + " on " + std::to_string(kv_len) +
             " keys, causal " + std::to_string(m.causal) + ", offset " + std::to_string(m.offset) + ", window " +
             std::to_string(m.window) + ", range " +
             (m.key_ranges ? std::to_string(m.key_ranges[b].begin) + " " + std::to_string(m.key_ranges[b].end) : "-") +
             ", prefix " + (m.prefixes ? std::to_string(m.prefixes[b]) : "-") + ", sequences " + std::to_string(m.sequences) +
             ": [" + std::to_string(keys.begin) + ", " + std::to_string(keys.end) + ")";
    };
    for (index_t key = 0; key < kv_len; ++key)
      ASSERT_EQ(key >= keys.begin && key < keys.end, sees(m, q_len, kv_len, b, row, key)) << "key " << key << ", " << text();
    ASSERT_LE(0, keys.begin) << text();
    ASSERT_LE(keys.begin, keys.end) << text();
    ASSERT_LE(keys.end, kv_len) << text();
    ASSERT_GE(keys.begin, before.begin) << "begin moved down, " << text();
    ASSERT_GE(keys.end, before.end) << "end moved down, " << text();
    before = keys;
  }
}

TEST(Mask, VisibleKeysAsDefined) {
  for (index_t q_len = 1; q_len <= 7; ++q_len)
    for (index_t kv_len = 0; kv_len <= 7; ++kv_len)
      for (const bool causal : {false, true})
        for (const index_t offset :
             {attention_mask::align_to_end, index_t{-9}, index_t{-2}, index_t{0}, index_t{1}, index_t{3}, index_t{12}})
          for (const index_t window :
               {attention_mask::unlimited, index_t{1}, index_t{2}, index_t{3}, index_t{6}, index_t{100}}) {
            if (!causal && (offset != attention_mask::align_to_end || window != attention_mask::unlimited)) continue;
            attention_mask m;
            m.causal = causal, m.offset = offset, m.window = window;
            expect_as_defined(m, q_len, kv_len, 0);
            std::vector<key_range> ranges;
            for (index_t begin = 0; begin <= kv_len; ++begin)
              for (index_t end = begin; end <= kv_len; ++end) ranges.push_back({begin, end});
            m.key_ranges = ranges.data();
            for (index_t b = 0; b < static_cast<index_t>(ranges.size()); ++b) expect_as_defined(m, q_len, kv_len, b);
            for (index_t prefix = 0; causal && prefix <= kv_len; ++prefix) {
              const std::vector<index_t> prefixes(ranges.size(), prefix);
              m.prefixes = prefixes.data();
              for (index_t b = 0; b < static_cast<index_t>(ranges.size()); ++b) expect_as_defined(m, q_len, kv_len, b);
            }
            if (testing::Test::HasFailure()) return;
          }
}

TEST(Mask, PackedAsDefined) {
  test::random_source random(8);
  for (int sample = 0; sample < 3000; ++sample) {
    std::vector<std::int32_t> query_starts = {0}, key_starts = {static_cast<std::int32_t>(random.integer(0, 2))};
    std::vector<index_t> prefixes;
    for (index_t n = random.integer(1, 6); n > 0; --n) {
      const index_t keys = random.integer(0, 5);
      query_starts.push_back(query_starts.back() + static_cast<std::int32_t>(random.integer(0, 5)));
      key_starts.push_back(key_starts.back() + static_cast<std::int32_t>(keys));
      prefixes.push_back(random.integer(0, keys));
    }
    attention_mask m;
    m.sequences = static_cast<index_t>(prefixes.size()), m.query_starts = query_starts.data(), m.key_starts = key_starts.data();
    const index_t q_len = query_starts.back(), kv_len = key_starts.back() + random.integer(0, 2);
    expect_as_defined(m, q_len, kv_len, 0);
    m.causal = true;
    expect_as_defined(m, q_len, kv_len, 0);
    m.offset = random.pick({attention_mask::align_to_end, index_t{-3}, index_t{0}, index_t{2}, index_t{9}, index_t{1} << 62});
    m.window = random.pick({attention_mask::unlimited, index_t{1}, index_t{3}, largest});
    expect_as_defined(m, q_len, kv_len, 0);
    m.prefixes = prefixes.data();
    expect_as_defined(m, q_len, kv_len, 0);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Numbers at the ends of what `check` accepts must not overflow.
TEST(Mask, ExtremeNumbers) {
  for (const index_t offset : {index_t{1} << 62, -(index_t{1} << 62), index_t{-1}, index_t{0}, attention_mask::align_to_end})
    for (const index_t window : {index_t{1}, largest, largest - 1, attention_mask::unlimited}) {
      attention_mask m;
      m.causal = true, m.offset = offset, m.window = window;
      expect_as_defined(m, 6, 4, 0);
      const index_t prefix = 3;
      m.prefixes = &prefix;
      expect_as_defined(m, 6, 4, 0);
    }
}

TEST(Mask, OffsetHidesNothingUnlessCausal) {
  for (const index_t offset : {index_t{-100}, index_t{1} << 62, -(index_t{1} << 62), attention_mask::align_to_end}) {
    attention_mask m;
    m.offset = offset;
    const key_range keys = visible_keys(m, 3, 5, 0, 2);
    EXPECT_EQ(keys.begin, 0);
    EXPECT_EQ(keys.end, 5);
    EXPECT_EQ(place_of_row(m, 3, 5, 0, 2).own, offset == attention_mask::align_to_end ? 4 : offset + 2);
  }
}

}  // namespace
