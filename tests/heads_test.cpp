// SPDX-License-Identifier: MIT
// Every head map against index tables written by hand, and against the list operations of the published code.

#include <gtest/gtest.h>

#include <diffattn/heads.hpp>
#include <ostream>
#include <vector>

#include "support/families.hpp"

namespace diffattn {
inline namespace v0_1 {
bool operator==(const head_indices& a, const head_indices& b) {
  return a.query_1 == b.query_1 && a.query_2 == b.query_2 && a.key_1 == b.key_1 && a.key_2 == b.key_2 &&
         a.value_1 == b.value_1 && a.value_2 == b.value_2;
}
void PrintTo(const head_indices& i, std::ostream* out) {
  *out << "q " << i.query_1 << " " << i.query_2 << " k " << i.key_1 << " " << i.key_2 << " v " << i.value_1 << " " << i.value_2;
}
}  // namespace v0_1
}  // namespace diffattn

namespace {

using diffattn::head_indices;
using diffattn::head_map;
using diffattn::index_t;
using diffattn::value_layout;

using table = std::vector<head_indices>;

table all(const head_map& m) {
  table t;
  for (index_t h = 0; h < m.heads; ++h) t.push_back(m[h]);
  return t;
}

TEST(Heads, UnilmVersion1Flash) {
  const table expected = {{0, 1, 0, 1, 0, -1}, {2, 3, 0, 1, 0, -1}, {4, 5, 2, 3, 1, -1}, {6, 7, 2, 3, 1, -1}};
  EXPECT_EQ(all(head_map::interleaved(4, 2)), expected);
}

TEST(Heads, UnilmVersion1Naive) {
  const table expected = {{0, 1, 0, 0, 0, -1}, {2, 3, 1, 1, 0, -1}, {4, 5, 2, 2, 1, -1}, {6, 7, 3, 3, 1, -1}};
  EXPECT_EQ(all(head_map::interleaved_repeated(4, 2)), expected);
  const table odd_ratio = {{0, 1, 0, 0, 0, -1}, {2, 3, 0, 1, 0, -1}, {4, 5, 1, 1, 0, -1}};
  EXPECT_EQ(all(head_map::interleaved_repeated(3, 1)), odd_ratio);
  EXPECT_EQ(all(head_map::interleaved_repeated(3, 3)), all(head_map::interleaved(3, 3)));
}

TEST(Heads, UnilmVersion2) {
  const table expected = {{0, 1, 0, 0, 0, -1}, {2, 3, 0, 0, 0, -1}, {4, 5, 1, 1, 1, -1}, {6, 7, 1, 1, 1, -1}};
  EXPECT_EQ(all(head_map::shared(4, 2)), expected);
}

TEST(Heads, DiffLlama) {
  const table mha = {{0, 2, 0, 2, 0, 2}, {1, 3, 1, 3, 1, 3}};
  EXPECT_EQ(all(head_map::halves(2, 4)), mha);
  const table grouped = {{0, 4, 0, 2, 0, 2}, {1, 5, 0, 2, 0, 2}, {2, 6, 1, 3, 1, 3}, {3, 7, 1, 3, 1, 3}};
  EXPECT_EQ(all(head_map::halves(4, 4)), grouped);
  const table one = {{0, 2, 0, 0, 0, 0}, {1, 3, 0, 0, 0, 0}};  // one kv head serves both halves
  EXPECT_EQ(all(head_map::halves(2, 1)), one);
  const table odd = {{0, 3, 0, 1, 0, 1}, {1, 4, 0, 2, 0, 2}, {2, 5, 1, 2, 1, 2}};  // 6 query heads on 3 kv heads
  EXPECT_EQ(all(head_map::halves(3, 3)), odd);
}

TEST(Heads, Phi4FlashAndMotif2p6b) {
  const table expected = {{0, 1, 0, 1, 0, 1}, {2, 3, 0, 1, 0, 1}, {4, 5, 2, 3, 2, 3}, {6, 7, 2, 3, 2, 3}};
  EXPECT_EQ(all(head_map::interleaved(4, 2, value_layout::adjacent)), expected);
}

TEST(Heads, Motif2Grouped) {
  const table expected = {{0, 4, 0, 1, 0, 1}, {1, 4, 0, 1, 0, 1}, {2, 4, 0, 1, 0, 1}, {3, 4, 0, 1, 0, 1},
                          {5, 9, 2, 3, 2, 3}, {6, 9, 2, 3, 2, 3}, {7, 9, 2, 3, 2, 3}, {8, 9, 2, 3, 2, 3}};
  EXPECT_EQ(all(head_map::grouped(8, 4, 2)), expected);
  const table two_groups_a_pair = {{0, 2, 0, 1, 0, 1}, {1, 2, 0, 1, 0, 1}, {3, 5, 0, 1, 0, 1}, {4, 5, 0, 1, 0, 1}};
  EXPECT_EQ(all(head_map::grouped(4, 2, 1)), two_groups_a_pair);
}

TEST(Heads, Motif3GroupedShared) {
  const table expected = {{0, 2, 0, 0, 0, -1}, {1, 2, 0, 0, 0, -1}, {3, 5, 1, 1, 1, -1}, {4, 5, 1, 1, 1, -1}};
  EXPECT_EQ(all(head_map::grouped_shared(4, 2, 2)), expected);
}

TEST(Heads, TimmAndDiffClip) {
  const table expected = {{0, 1, 0, 1, 0, -1}, {2, 3, 2, 3, 1, -1}, {4, 5, 4, 5, 2, -1}};
  EXPECT_EQ(all(head_map::interleaved(3, 3)), expected);
}

TEST(Heads, Axolotl) {
  const table split = {{0, 4, 0, 2, 0, 2}, {1, 5, 0, 2, 0, 2}, {2, 6, 1, 3, 1, 3}, {3, 7, 1, 3, 1, 3}};
  EXPECT_EQ(all(head_map::component_major(4, 2)), split);
  const table doubled = {{0, 4, 0, 2, 0, -1}, {1, 5, 0, 2, 0, -1}, {2, 6, 1, 3, 1, -1}, {3, 7, 1, 3, 1, -1}};
  EXPECT_EQ(all(head_map::component_major(4, 2, value_layout::wide)), doubled);
}

TEST(Heads, Single) {
  const table expected = {{0, 0, 0, 0, 0, -1}, {1, 1, 0, 0, 0, -1}, {2, 2, 1, 1, 1, -1}, {3, 3, 1, 1, 1, -1}};
  EXPECT_EQ(all(head_map::single(4, 2)), expected);
}

TEST(Heads, Table) {
  const table expected = {{5, 0, 1, 1, 2, 0}, {3, 3, 0, 2, 1, 1}};
  EXPECT_EQ(all(head_map::table(expected.data(), 2)), expected);
}

// The rows of the edge-case list that are about heads: one token, so that a head's output is (1 - λ) times its value.
TEST(Heads, E55_E56_E57_ValuesOfOneToken) {
  const double v[] = {10, 20, 30, 40};
  const auto outputs = [&v](const head_map& m) {
    std::vector<std::vector<double>> o;
    for (index_t h = 0; h < m.heads; ++h) o.push_back({0.5 * v[m[h].value_1], 0.5 * v[m[h].value_2]});
    return o;
  };
  using rows = std::vector<std::vector<double>>;
  EXPECT_EQ(outputs(head_map::interleaved(4, 2, value_layout::adjacent)), (rows{{5, 10}, {5, 10}, {15, 20}, {15, 20}}));
  EXPECT_EQ(outputs(head_map::halves(2, 4)), (rows{{5, 15}, {10, 20}}));
  EXPECT_EQ(outputs(head_map::halves(4, 4)), (rows{{5, 15}, {5, 15}, {10, 20}, {10, 20}}));
}

TEST(Heads, AgreeWithTheListsOfThePublishedCode) {
  for (const test::family f : test::all_families)
    for (long kv = 1; kv <= 6; ++kv)
      for (long ratio = 1; ratio <= 4; ++ratio)
        for (long multiple = 1; multiple <= 3; ++multiple) {
          if (f == test::family::table) continue;
          table memory;
          const long heads = kv * ratio * multiple;
          const test::head_choice c = test::choose_heads(f, heads, kv, ratio, memory);
          EXPECT_EQ(all(c.map), c.heads) << name(f) << " heads " << heads << " kv " << kv << " ratio " << ratio;
        }
}

}  // namespace
