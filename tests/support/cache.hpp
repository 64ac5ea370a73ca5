// SPDX-License-Identifier: MIT
#pragma once

// Caches for tests, and what their rows say by the document in storage.hpp: a reader that shares nothing with the library's.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <diffattn/kv_cache.hpp>
#include <limits>
#include <string>
#include <vector>

#include "guarded.hpp"
#include "random.hpp"

namespace test {

using diffattn::index_t;
using diffattn::kv_cache_kind;
using diffattn::storage;

inline constexpr storage float_storages[] = {storage::f32, storage::f16, storage::bf16, storage::int8, storage::q6};

inline const char* name(storage s) {
  static const char* const names[] = {"f64", "f32", "f16", "bf16", "int8", "q6"};
  return names[static_cast<int>(s)];
}

inline double value_of_f16(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
  const double size = exponent == 0 ? std::ldexp(fraction, -24)
                      : exponent == 31
                          ? (fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN())
                          : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}
inline double value_of_bf16(unsigned bits) {
  const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return double(x);
}

/// Number i of a stored row.
inline double stored_number(storage type, const unsigned char* row, index_t i) {
  const auto read = [&](auto x, index_t at) {
    std::memcpy(&x, row + at, sizeof x);
    return x;
  };
  switch (type) {
    case storage::f64: return read(0.0, 8 * i);
    case storage::f32: return double(read(0.0f, 4 * i));
    case storage::f16: return value_of_f16(read(std::uint16_t{0}, 2 * i));
    case storage::bf16: return value_of_bf16(read(std::uint16_t{0}, 2 * i));
    case storage::int8: return double(read(0.0f, 0)) * read(std::int8_t{0}, 4 + i);
    case storage::q6: {
      const unsigned char* const block = row + i / 32 * 26;
      const index_t n = i % 32;
      const int low = block[n % 16] >> (n < 16 ? 0 : 4) & 15, high = block[16 + n % 8] >> (n / 8 * 2) & 3;
      return value_of_bf16(block[24] + 256u * block[25]) * ((low | high << 4) - 32);
    }
  }
  return std::numeric_limits<double>::quiet_NaN();
}

/// The row of a token, by the rule of kv_view.hpp.
inline const unsigned char* stored_row(const diffattn::kv_view& view, const diffattn::kv_rows& rows, index_t sequence,
                                       index_t token, index_t head) {
  const index_t page =
      view.table ? view.table[sequence * view.table_pages + token / view.page_tokens % view.table_pages] : sequence;
  return static_cast<const unsigned char*>(rows.data) + page * rows.page_stride + head * rows.head_stride +
         token % view.page_tokens * rows.token_stride;
}

/// Which cache, apart from its sizes.
struct cache_choice {
  kv_cache_kind kind = kv_cache_kind::contiguous;
  index_t page_tokens = 16;

  std::string text() const {
    static const char* const names[] = {"contiguous", "ring", "pages of "};
    return names[static_cast<int>(kind)] + (kind == kv_cache_kind::paged ? std::to_string(page_tokens) : std::string());
  }
};

inline constexpr cache_choice contiguous = {kv_cache_kind::contiguous}, ring = {kv_cache_kind::ring};
inline constexpr cache_choice all_caches[] = {
    contiguous, ring, {kv_cache_kind::paged, 1}, {kv_cache_kind::paged, 16}, {kv_cache_kind::paged, 64}};

/// A cache with its memory, which holds NaN wherever nothing has been written.
class owned_cache {
 public:
  explicit owned_cache(const diffattn::kv_cache_config& config) : memory_(diffattn::kv_cache_bytes(config) - spare_line, 0xff) {
    const diffattn::status s = cache_.open(config, {memory_.data(), memory_.size() + spare_line});
    EXPECT_EQ(s, diffattn::status::ok) << message(s);
  }
  diffattn::kv_cache* operator->() { return &cache_; }
  const std::vector<unsigned char>& memory() const { return memory_; }

  /// Appends the tokens [begin, end) of entry b of k and v to one sequence.
  template <class T>
  void append(index_t sequence, const diffattn::tensor_view<T>& k, const diffattn::tensor_view<T>& v, index_t b, index_t begin,
              index_t end) {
    const auto cut = [&](diffattn::tensor_view<T> x, const diffattn::kv_rows& rows) {
      x.data = x.at(b, begin, 0), x.batch = 1, x.tokens = end - begin;
      x.heads = rows.heads;  // a table may leave the last heads unused
      return x;
    };
    const diffattn::kv_view view = cache_.view();
    const diffattn::status s = cache_.append(sequence, cut(k, view.keys), cut(v, view.values));
    EXPECT_EQ(s, diffattn::status::ok) << message(s);
  }

  /// Appends all entries of k and v, entry b to sequence sequences[b], in turns, so that no sequence has its pages in a row.
  template <class T>
  void append_in_turns(const std::vector<index_t>& sequences, const diffattn::tensor_view<T>& k,
                       const diffattn::tensor_view<T>& v) {
    random_source random(3);
    std::vector<index_t> done(sequences.size());
    for (bool more = true; more;) {
      more = false;
      for (std::size_t b = 0; b < sequences.size(); ++b) {
        const index_t end = std::min(k.tokens, done[b] + random.integer(1, 3 + k.tokens / 4));
        if (end > done[b]) append(sequences[b], k, v, static_cast<index_t>(b), done[b], end);
        done[b] = end;
        more |= end < k.tokens;
      }
    }
  }

 private:
  std::vector<unsigned char> memory_;
  diffattn::kv_cache cache_;
};

}  // namespace test
