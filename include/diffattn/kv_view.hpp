// SPDX-License-Identifier: MIT
#pragma once

// Keys and values as a call reads them: rows in pages. One rule finds every row of every kind of cache,
//
//   token t of sequence s  is row  t mod page_tokens  of page  table[s][t / page_tokens mod table_pages]
//
//   contiguous   one page a sequence, as large as its capacity
//   ring         the same, and t goes on past the capacity: token t takes the place of token t - page_tokens
//   paged        small pages of a common pool, in any order, one page in several sequences if their prefixes agree
//
// A view owns nothing and changes nothing: a layer may read the cache of another one, and an engine that keeps its own pages
// describes them here. kv_cache.hpp has a cache that fills one.

#include "heads.hpp"
#include "storage.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// The key rows or the value rows of a pool of pages. Strides count bytes; the bytes of a row are contiguous.
struct kv_rows {
  const void* data = nullptr;
  storage type = storage::f32;
  index_t heads = 0;  ///< of one token
  index_t width = 0;  ///< numbers of a row
  index_t page_stride = 0, head_stride = 0, token_stride = 0;

  DIFFATTN_INLINE const unsigned char* at(index_t page, index_t head, index_t row) const noexcept {
    return static_cast<const unsigned char*>(data) + (page * page_stride + head * head_stride + row * token_stride);
  }
};

struct kv_view {
  kv_rows keys, values;
  head_map heads;           ///< what the heads mean; a call with another head map is refused. Not given (heads = 0): any call
  index_t sequences = 0;    ///< rows of the table
  index_t page_tokens = 0;  ///< tokens of a page
  index_t pages = 0;        ///< of the pool
  index_t table_pages = 1;  ///< pages of a sequence
  const std::int32_t* table = nullptr;       ///< [sequences][table_pages]; null: sequence s has page s (table_pages = 1)
  const index_t* lengths = nullptr;          ///< [sequences] tokens written so far; null: `same_length`
  index_t same_length = -1;                  ///< tokens of every sequence; -1: page_tokens
  const index_t* begins = nullptr;           ///< [sequences] the first token still held; null: 0
  const std::int32_t* references = nullptr;  ///< [pages] 0 marks a free page; null: every page holds data

  DIFFATTN_INLINE bool is_given() const noexcept { return page_tokens != 0 || sequences != 0 || keys.data || values.data; }
  DIFFATTN_INLINE index_t length(index_t s) const noexcept {
    return lengths ? lengths[s] : same_length >= 0 ? same_length : page_tokens;
  }
  DIFFATTN_INLINE index_t begin(index_t s) const noexcept { return begins ? begins[s] : 0; }
  /// Only for tokens that the sequence holds.
  DIFFATTN_INLINE index_t page(index_t s, index_t token) const noexcept {
    return table ? table[s * table_pages + token / page_tokens % table_pages] : s;
  }
};

/// Do two maps read the same heads?
DIFFATTN_INLINE bool same_heads(const head_map& a, const head_map& b) noexcept {
  if (a.heads != b.heads) return false;
  for (index_t h = 0; h < a.heads; ++h) {
    const head_indices x = a[h], y = b[h];
    if (x.query_1 != y.query_1 || x.query_2 != y.query_2 || x.key_1 != y.key_1 || x.key_2 != y.key_2 ||
        x.value_1 != y.value_1 || x.value_2 != y.value_2)
      return false;
  }
  return true;
}

DIFFATTN_NAMESPACE_END

// Has lambdas, which a compiler may leave out of line: one copy for each instruction set.
DIFFATTN_ISA_NAMESPACE_BEGIN

/// Tensors [batch, tokens, heads, width] as they lie, each batch entry a sequence of one page.
template <class T>
DIFFATTN_INLINE kv_view view_of_tensors(const tensor_view<const T>& k, const tensor_view<const T>& v) noexcept {
  // The stride of an axis without a second element may be any number; it is not used.
  const auto bytes = [](index_t stride) { return static_cast<index_t>(static_cast<std::uint64_t>(stride) * sizeof(T)); };
  const auto rows = [bytes](const tensor_view<const T>& t) {
    return kv_rows{t.data, storage_of<T>, t.heads, t.width, bytes(t.batch_stride), bytes(t.head_stride), bytes(t.token_stride)};
  };
  kv_view view;
  view.keys = rows(k), view.values = rows(v);
  view.sequences = view.pages = k.batch, view.page_tokens = k.tokens;
  return view;
}

DIFFATTN_ISA_NAMESPACE_END
