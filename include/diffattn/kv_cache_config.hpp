// SPDX-License-Identifier: MIT
#pragma once

// Which cache, how much memory it takes, and where its parts lie in that memory.

#include <limits>

#include "check.hpp"
#include "kv_view.hpp"
#include "workspace.hpp"

DIFFATTN_NAMESPACE_BEGIN

enum class kv_cache_kind {
  contiguous,  ///< `capacity` tokens of every sequence
  ring,        ///< the last `capacity` tokens of every sequence; appending overwrites the first ones
  paged        ///< pages of a common pool, taken when tokens come and given back when the last sequence forgets theirs
};

struct kv_cache_config {
  head_map heads;                          ///< says how many key and value heads a token has; a table must outlive the cache
  index_t key_width = 0, value_width = 0;  ///< numbers of one head
  storage keys = storage::f32, values = storage::f32;
  kv_cache_kind kind = kv_cache_kind::contiguous;
  index_t sequences = 1;
  index_t capacity = 0;      ///< tokens that a sequence can hold. Paged: counted from the first page that it still holds
  index_t page_tokens = 16;  ///< paged: tokens of a page
  index_t pages = 0;         ///< paged: pages of the pool; 0: enough for all sequences
};

DIFFATTN_NAMESPACE_END

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace cache {

/// Where the parts of a cache lie; all null when only counted.
struct parts {
  kv_view view;
  index_t *lengths = nullptr, *begins = nullptr;         ///< [sequences]
  std::int32_t *table = nullptr, *references = nullptr;  ///< as in the view
  std::int32_t* free = nullptr;     ///< [pages] the free ones, a stack: the page that was freed last is taken first
  index_t* free_pages = nullptr;    ///< [1] height of that stack
  std::int32_t* writers = nullptr;  ///< [pages] for the checks of `append`, zero between calls
  unsigned char* seen = nullptr;    ///< [sequences] likewise
  float* row = nullptr;             ///< [key_width] a key row of a 16-bit tensor, widened to be rotated
};

/// Carves the parts of a cache whose config is meaningful; a size that overflows makes `checks::limit` bytes or more.
DIFFATTN_INLINE parts carve(const kv_cache_config& c, index_t key_heads, index_t value_heads, arena& memory) noexcept {
  const bool paged = c.kind == kv_cache_kind::paged;
  parts p;
  kv_view& v = p.view;
  v.heads = c.heads;
  v.sequences = c.sequences;
  v.page_tokens = paged ? c.page_tokens : c.capacity;
  v.table_pages = paged ? (c.capacity + c.page_tokens - 1) / c.page_tokens : 1;
  v.pages = paged && c.pages > 0 ? c.pages : checks::capped_product(c.sequences, v.table_pages);
  const auto pool = [&](storage type, index_t heads, index_t width) {
    constexpr index_t line = static_cast<index_t>(arena::alignment);
    kv_rows rows{nullptr, type, heads, width, 0, 0, row_bytes(type, width)};
    rows.head_stride = (checks::capped_product(v.page_tokens, rows.token_stride) + line - 1) / line * line;
    rows.page_stride = checks::capped_product(heads, rows.head_stride);
    rows.data = memory.take<unsigned char>(static_cast<std::size_t>(rows.page_stride), static_cast<std::size_t>(v.pages));
    return rows;
  };
  v.keys = pool(c.keys, key_heads, c.key_width);
  v.values = pool(c.values, value_heads, c.value_width);
  const std::size_t sequences = static_cast<std::size_t>(v.sequences), pages = static_cast<std::size_t>(v.pages);
  v.lengths = p.lengths = memory.take<index_t>(sequences);
  v.begins = p.begins = memory.take<index_t>(sequences);
  p.seen = memory.take<unsigned char>(sequences);
  p.row = memory.take<float>(static_cast<std::size_t>(c.key_width));
  if (paged) {
    v.table = p.table = memory.take<std::int32_t>(sequences, static_cast<std::size_t>(v.table_pages));
    v.references = p.references = memory.take<std::int32_t>(pages);
    p.free = memory.take<std::int32_t>(pages);
    p.writers = memory.take<std::int32_t>(pages);
    p.free_pages = memory.take<index_t>(1);
  }
  return p;
}

/// Checks a config and, if it is good, carves its cache.
DIFFATTN_INLINE status plan(const kv_cache_config& c, arena& memory, parts& p) noexcept {
  constexpr index_t most_pages = std::numeric_limits<std::int32_t>::max();
  const bool paged = c.kind == kv_cache_kind::paged;
  checks::head_counts heads;
  if (const status s = checks::heads(c.heads, heads); s != status::ok) return s;
  if (heads.keys > checks::max_heads || heads.values > checks::max_heads) return status::cache_config;
  if (row_bytes(c.keys, 1) == 0 || row_bytes(c.values, 1) == 0 || (c.keys == storage::f64) != (c.values == storage::f64))
    return status::cache_storage;
  const index_t sizes[] = {c.key_width, c.value_width, c.sequences, c.capacity, paged ? c.page_tokens : 1};
  for (const index_t size : sizes)
    if (size <= 0 || size >= checks::limit / 64) return status::cache_config;
  if (!paged && c.kind != kv_cache_kind::contiguous && c.kind != kv_cache_kind::ring) return status::cache_config;
  if (c.sequences > most_pages || (paged && c.pages < 0)) return status::cache_config;
  p = carve(c, heads.keys, heads.values, memory);
  const bool large = p.view.pages > most_pages || memory.bytes() >= std::size_t{checks::limit / 8};
  return large ? status::cache_config : status::ok;
}

}  // namespace cache

/// The first thing wrong with a config, or ok.
inline status check(const kv_cache_config& config) noexcept {
  arena counter;
  cache::parts unused;
  return cache::plan(config, counter, unused);
}

/// Bytes of memory for a cache, exactly; 0 if the config is wrong.
inline std::size_t kv_cache_bytes(const kv_cache_config& config) noexcept {
  arena counter;
  cache::parts unused;
  return cache::plan(config, counter, unused) == status::ok ? counter.bytes() : 0;
}

DIFFATTN_ISA_NAMESPACE_END
