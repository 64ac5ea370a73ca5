// SPDX-License-Identifier: MIT
// The interval of visible keys against the definition, key by key.

#include <gtest/gtest.h>

#include <diffattn/mask.hpp>
#include <limits>
#include <vector>

namespace {

using diffattn::attention_mask;
using diffattn::index_t;
using diffattn::key_range;

constexpr index_t largest = std::numeric_limits<index_t>::max();

/// The definition, in wide enough numbers.
bool sees(const attention_mask& m, index_t q_len, index_t kv_len, index_t b, index_t row, index_t key) {
  if (m.key_ranges && (key < m.key_ranges[b].begin || key >= m.key_ranges[b].end)) return false;
  if (!m.causal) return true;
  const double own =
      static_cast<double>(row) + static_cast<double>(m.offset == attention_mask::align_to_end ? kv_len - q_len : m.offset);
  const double k = static_cast<double>(key);
  return k <= own && (m.window == attention_mask::unlimited || own - k < static_cast<double>(m.window));
}

void expect_as_defined(const attention_mask& m, index_t q_len, index_t kv_len, index_t b) {
  key_range before{0, 0};
  for (index_t row = 0; row < q_len; ++row) {
    const key_range keys = visible_keys(m, q_len, kv_len, b, row);
    const auto text = [&] {
      return "row " + std::to_string(row) + " of " + std::to_string(q_len) + " on " + std::to_string(kv_len) +
             " keys, causal " + std::to_string(m.causal) + ", offset " + std::to_string(m.offset) + ", window " +
             std::to_string(m.window) + ", range " +
             (m.key_ranges ? std::to_string(m.key_ranges[b].begin) + " " + std::to_string(m.key_ranges[b].end) : "-") + ": [" +
             std::to_string(keys.begin) + ", " + std::to_string(keys.end) + ")";
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
            if (testing::Test::HasFailure()) return;
          }
}

// Numbers at the ends of what `check` accepts must not overflow.
TEST(Mask, ExtremeNumbers) {
  for (const index_t offset : {index_t{1} << 62, -(index_t{1} << 62), index_t{-1}, index_t{0}, attention_mask::align_to_end})
    for (const index_t window : {index_t{1}, largest, largest - 1, attention_mask::unlimited}) {
      attention_mask m;
      m.causal = true, m.offset = offset, m.window = window;
      expect_as_defined(m, 6, 4, 0);
    }
}

TEST(Mask, OffsetOnlyReadIfCausal) {
  attention_mask m;
  m.offset = -100;
  const key_range keys = visible_keys(m, 3, 5, 0, 0);
  EXPECT_EQ(keys.begin, 0);
  EXPECT_EQ(keys.end, 5);
}

}  // namespace
