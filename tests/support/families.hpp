// SPDX-License-Identifier: MIT
#pragma once

// Which physical heads each published family reads, by the list operations of the published code: number the heads, then
// repeat, split and stack the numbers as it does with tensors. Nothing here divides an index, which is what head_map does.

#include <cstddef>
#include <diffattn/heads.hpp>
#include <string>
#include <vector>

namespace test {

enum class family {
  interleaved,           // wide values
  interleaved_adjacent,  // two adjacent narrow values
  interleaved_repeated,
  halves,
  grouped,
  grouped_wide,
  grouped_shared,
  shared,
  component_major,
  component_major_wide,
  table
};

inline constexpr family all_families[] = {family::interleaved,
                                          family::interleaved_adjacent,
                                          family::interleaved_repeated,
                                          family::halves,
                                          family::grouped,
                                          family::grouped_wide,
                                          family::grouped_shared,
                                          family::shared,
                                          family::component_major,
                                          family::component_major_wide,
                                          family::table};

inline const char* name(family f) {
  static const char* const names[] = {
      "interleaved", "interleaved_adjacent", "interleaved_repeated", "halves", "grouped", "grouped_wide", "grouped_shared",
      "shared",      "component_major",      "component_major_wide", "table"};
  return names[static_cast<int>(f)];
}

/// A family with its numbers: what the library is told, and what that must mean.
struct head_choice {
  diffattn::head_map map;
  std::vector<diffattn::head_indices> heads;
  long q_heads = 0, k_heads = 0, v_heads = 0;
  bool two_values = false;
};

namespace heads {

using list = std::vector<long>;
inline list count(long n) {
  list l;
  for (long i = 0; i < n; ++i) l.push_back(i);
  return l;
}
/// Each element `times` times in a row (repeat_interleave).
inline list repeat(const list& from, long times) {
  list l;
  for (long x : from)
    for (long i = 0; i < times; ++i) l.push_back(x);
  return l;
}
/// Elements 2i + which.
inline list stripe(const list& from, std::size_t which) {
  list l;
  for (std::size_t i = which; i < from.size(); i += 2) l.push_back(from[i]);
  return l;
}
inline list half(const list& from, std::size_t which) {
  const auto middle = from.begin() + static_cast<std::ptrdiff_t>(from.size() / 2);
  return which == 0 ? list(from.begin(), middle) : list(middle, from.end());
}

}  // namespace heads

/// `heads` differential heads, `kv` key/value pairs (or heads, where the family counts those), `ratio` signal heads to a noise
/// head. A table assigns heads in an order of its own; it needs kv == heads.
inline head_choice choose_heads(family f, long n, long kv, long ratio, std::vector<diffattn::head_indices>& table_memory) {
  using namespace heads;
  using diffattn::head_map;
  using diffattn::value_layout;
  head_choice c;
  list q1, q2, k1, k2, v1, v2;
  const list queries = count(2 * n), keys = count(2 * kv);
  c.q_heads = 2 * n, c.k_heads = 2 * kv, c.v_heads = kv;
  q1 = stripe(queries, 0), q2 = stripe(queries, 1);
  k1 = repeat(stripe(keys, 0), n / kv), k2 = repeat(stripe(keys, 1), n / kv);
  v1 = repeat(count(kv), n / kv);
  const auto group_queries = [&] {
    q1.clear(), q2.clear();
    long next = 0;
    for (long group = 0; group < n / ratio; ++group) {
      for (long s = 0; s < ratio; ++s) q1.push_back(next++);
      for (long s = 0; s < ratio; ++s) q2.push_back(next);
      ++next;
    }
    c.q_heads = next;
  };
  const auto adjacent_values = [&] { v1 = k1, v2 = k2, c.v_heads = 2 * kv; };
  switch (f) {
    case family::interleaved: c.map = head_map::interleaved(n, kv); break;
    case family::interleaved_adjacent:
      c.map = head_map::interleaved(n, kv, value_layout::adjacent);
      adjacent_values();
      break;
    case family::interleaved_repeated:
      c.map = head_map::interleaved_repeated(n, kv);
      k1 = stripe(repeat(keys, n / kv), 0), k2 = stripe(repeat(keys, n / kv), 1);
      break;
    case family::halves:
      c.map = head_map::halves(n, kv);
      c.k_heads = c.v_heads = kv;
      q1 = half(queries, 0), q2 = half(queries, 1);
      v1 = k1 = half(repeat(count(kv), 2 * n / kv), 0);
      v2 = k2 = half(repeat(count(kv), 2 * n / kv), 1);
      break;
    case family::grouped:
      c.map = head_map::grouped(n, ratio, kv);
      group_queries();
      adjacent_values();
      break;
    case family::grouped_wide:
      c.map = head_map::grouped(n, ratio, kv, value_layout::wide);
      group_queries();
      break;
    case family::grouped_shared:
      c.map = head_map::grouped_shared(n, ratio, kv);
      group_queries();
      c.k_heads = kv;
      k1 = k2 = v1;
      break;
    case family::shared:
      c.map = head_map::shared(n, kv);
      c.k_heads = kv;
      k1 = v1 = stripe(repeat(count(kv), 2 * n / kv), 0);
      k2 = stripe(repeat(count(kv), 2 * n / kv), 1);
      break;
    case family::component_major:
    case family::component_major_wide:
      c.map = head_map::component_major(n, kv);
      q1 = half(queries, 0), q2 = half(queries, 1);
      k1 = repeat(half(keys, 0), n / kv), k2 = repeat(half(keys, 1), n / kv);
      if (f == family::component_major)
        adjacent_values();
      else
        c.map = head_map::component_major(n, kv, value_layout::wide);
      break;
    case family::table:
      // Backwards, one head left unused, the same value for all even heads.
      c.q_heads = 2 * n + 1;
      for (long h = 0; h < n; ++h) {
        const auto i = static_cast<std::size_t>(h);
        q1[i] = 2 * n - h, q2[i] = h, k1[i] = h, k2[i] = 2 * n - 1 - h, v1[i] = h % 2 == 0 ? 0 : h;
      }
      c.k_heads = 2 * n, c.v_heads = n;
      break;
  }
  c.two_values = !v2.empty();
  for (std::size_t h = 0; h < static_cast<std::size_t>(n); ++h)
    c.heads.push_back({q1[h], q2[h], k1[h], k2[h], v1[h], c.two_values ? v2[h] : -1});
  if (f == family::table) table_memory = c.heads, c.map = head_map::table(table_memory.data(), n);
  return c;
}

}  // namespace test
