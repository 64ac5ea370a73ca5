// SPDX-License-Identifier: MIT
#pragma once

// Which dot products a unit needs: each pair of a query head and a key head once, however many differential heads use it,
// unless rules make of one logit something else in each head and map.

#include "../heads.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace schedule {

/// A query head that is compared with a key head: the signal heads of a group share the line of their noise head.
struct stream_line {
  index_t query, key;
  index_t head;  ///< the first output head that uses it, and its map there
  int map;
};

/// Lines of a unit, those of one key head together, and the lines of each of its heads.
struct stream_lines {
  index_t* count;
  stream_line* lines;
  index_t* map[2];  ///< [heads] line of each map

  /// Fills the lists for heads [begin, end) of the call; with `each`, each head and map has a line of its own.
  inline void list(const head_map& heads, index_t begin, index_t end, int maps, bool each) const noexcept {
    const auto query = [](const head_indices& i, int m) { return m == 0 ? i.query_1 : i.query_2; };
    const auto key = [](const head_indices& i, int m) { return m == 0 ? i.key_1 : i.key_2; };
    *count = 0;
    for (index_t h = begin; h < end; ++h)
      for (int m = 0; m < maps; ++m) insert({query(heads[h], m), key(heads[h], m), h, m}, each);
    for (index_t h = begin; h < end; ++h)
      for (int m = 0; m < maps; ++m) {
        index_t l = 0;
        while (lines[l].query != query(heads[h], m) || lines[l].key != key(heads[h], m) ||
               (each && (lines[l].head != h || lines[l].map != m)))
          ++l;
        map[m][h - begin] = l;
      }
  }

 private:
  inline void insert(stream_line line, bool each) const noexcept {
    index_t at = *count;
    for (index_t l = 0; l < *count; ++l) {
      if (lines[l].key != line.key) continue;
      if (lines[l].query == line.query && !each) return;
      at = l + 1;
    }
    for (index_t l = (*count)++; l > at; --l) lines[l] = lines[l - 1];
    lines[at] = line;
  }
};

}  // namespace schedule
DIFFATTN_ISA_NAMESPACE_END
