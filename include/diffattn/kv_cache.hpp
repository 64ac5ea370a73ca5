// SPDX-License-Identifier: MIT
#pragma once

// The keys and values that a layer has seen, in memory of the caller:
//
//   status      check(config)                          is the cache possible?
//   size_t      kv_cache_bytes(config)                 memory it needs
//   status      cache.open(config, memory)             empty sequences
//   status      cache.append(k, v, sequences, rope)    new tokens, converted to the storage type
//   status      cache.truncate / discard / reset       forget the last tokens, the first ones, all
//   status      cache.fork(from, to)                   a second continuation of the same tokens (paged)
//   kv_view     cache.view()                           what a call reads; it follows every change but open
//
// After any status but `ok` the memory is as before, bit for bit: whatever can go wrong is found before the first change.
// Calls that change a cache must not run at the same time as any other call on it.

#include <cstring>

#include "kernel/rows.hpp"
#include "kv_cache_config.hpp"
#include "rope.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace cache {

/// A row to write to: the pools are const for those who read the view, not for the cache.
DIFFATTN_INLINE unsigned char* writable(const kv_rows& rows, index_t page, index_t head, index_t row) noexcept {
  return const_cast<unsigned char*>(rows.at(page, head, row));
}

}  // namespace cache

/// A cache in memory of the caller, of any alignment, which must stay where it is. Everything that changes lies in that memory,
/// so this is a handle: copies of it are the same cache, and nothing is to be closed.
class kv_cache {
 public:
  /// Starts with empty sequences, whatever the memory holds. Errors: those of `check`, cache_memory.
  inline status open(const kv_cache_config& config, workspace memory) noexcept {
    const status s = attach(config, memory);
    return s == status::ok ? reset() : s;
  }
  /// Goes on with what the memory holds: another handle's cache of the same config, or a copy of its memory, also from a file.
  /// (It holds no addresses. A copy must lie equally far behind a multiple of 64.) Errors: those of `open`.
  inline status attach(const kv_cache_config& config, workspace memory) noexcept {
    arena counter;
    cache::parts parts;
    if (const status s = cache::plan(config, counter, parts); s != status::ok) return s;
    if (!memory.data || memory.bytes < counter.bytes()) return status::cache_memory;
    arena carver(memory.data);
    cache::plan(config, carver, parts);
    config_ = config, parts_ = parts, memory_ = {memory.data, counter.bytes()};
    std::memset(parts.seen, 0, static_cast<std::size_t>(config.sequences));
    if (is_paged()) std::memset(parts.writers, 0, static_cast<std::size_t>(parts.view.pages) * sizeof(std::int32_t));
    return status::ok;
  }

  DIFFATTN_INLINE bool is_open() const noexcept { return memory_.data != nullptr; }
  DIFFATTN_INLINE const kv_cache_config& config() const noexcept { return config_; }
  /// Refused by every call before `open`; follows every change until the memory is opened again or freed.
  DIFFATTN_INLINE kv_view view() const noexcept {
    kv_view v = parts_.view;
    if (!is_open()) v.sequences = -1;  // refused as a cache, not taken for "no cache given"
    return v;
  }
  /// Tokens written so far and the first one still held; 0 for a sequence that does not exist.
  DIFFATTN_INLINE index_t length(index_t s) const noexcept { return has(s) ? parts_.lengths[s] : 0; }
  DIFFATTN_INLINE index_t begin(index_t s) const noexcept { return has(s) ? parts_.begins[s] : 0; }
  /// Pages that no sequence uses; 0 unless paged.
  DIFFATTN_INLINE index_t free_pages() const noexcept { return is_paged() ? *parts_.free_pages : 0; }

  /// Appends k [batch, n, key heads, key_width] and v [batch, n, value heads, value_width], entry b to sequence sequences[b];
  /// null: entry b to sequence b, for all sequences. Elements are float, f16 or bf16; double if the storage is f64, and only
  /// then. Given a rope, keys are rotated by their positions, which count from the length that the sequence has before. A ring
  /// takes any n. Errors: cache_not_open, cache_storage, k_*, v_*, cache_key_shape, cache_value_shape, cache_sequence,
  /// cache_overlap, rope_*, cache_full, cache_no_page.
  template <class K, class V>
  inline status append(const tensor_view<K>& k, const tensor_view<V>& v, const index_t* sequences = nullptr,
                       const rope_view& rope = {}) noexcept {
    using T = std::remove_const_t<K>;
    static_assert(is_element<T>, "diffattn: elements are float, double, f16 or bf16");
    static_assert(std::is_same_v<T, std::remove_const_t<V>>, "diffattn: k and v must have the same element type");
    if (const status s = check_append<T>(k, v, sequences, rope); s != status::ok || k.tokens == 0) return s;
    for (index_t b = 0; b < k.batch; ++b) {
      const index_t s = sequences ? sequences[b] : b, length = parts_.lengths[s], end = length + k.tokens;
      index_t& begin = parts_.begins[s];
      if (is_paged()) own_pages(s, k.tokens);
      if (config_.kind == kv_cache_kind::ring && begin < end - config_.capacity) begin = end - config_.capacity;
      for (index_t p = begin > length ? begin : length; p < end; ++p) {
        write<T>(parts_.view.keys, s, p, k, b, p - length, rope);
        write<T>(parts_.view.values, s, p, v, b, p - length, rope_view{});
      }
      parts_.lengths[s] = end;
    }
    return status::ok;
  }
  /// Not a sequence but a null pointer: ambiguous to the reader.
  template <class K, class V>
  status append(const tensor_view<K>& k, const tensor_view<V>& v, int) = delete;
  /// The same for one sequence; batch must be 1.
  template <class K, class V>
  inline status append(index_t sequence, const tensor_view<K>& k, const tensor_view<V>& v,
                       const rope_view& rope = {}) noexcept {
    return is_open() && k.batch != 1 ? status::cache_sequence : append(k, v, &sequence, rope);
  }

  /// Forgets the tokens from `length` on: speculative decoding. What a ring has overwritten does not come back: `begin` stays.
  /// Errors: cache_not_open, cache_sequence, cache_length unless begin(s) <= length <= length(s).
  inline status truncate(index_t s, index_t length) noexcept {
    if (const status error = check_sequence(s); error != status::ok) return error;
    const index_t begin = parts_.begins[s], old = parts_.lengths[s];
    if (length < begin || length > old) return status::cache_length;
    if (is_paged()) release_pages(s, length > begin ? pages_up_to(length) : page_of(begin), pages_up_to(old));
    parts_.lengths[s] = length;
    return status::ok;
  }

  /// Forgets the tokens before `before`, if it holds any: sliding windows. Paged: gives whole pages back; with a window of w
  /// tokens and n new ones at a time, a capacity of w + n + page_tokens - 1 lasts for ever. Errors: cache_not_open,
  /// cache_sequence, cache_length if before > length(s).
  inline status discard(index_t s, index_t before) noexcept {
    if (const status error = check_sequence(s); error != status::ok) return error;
    const index_t begin = parts_.begins[s], length = parts_.lengths[s];
    if (before > length) return status::cache_length;
    if (before <= begin) return status::ok;
    if (is_paged()) release_pages(s, page_of(begin), before < length ? page_of(before) : pages_up_to(length));
    parts_.begins[s] = before;
    return status::ok;
  }

  /// Empties one sequence; its next token has position 0. Errors: cache_not_open, cache_sequence.
  inline status reset(index_t s) noexcept {
    if (const status error = check_sequence(s); error != status::ok) return error;
    if (is_paged()) release_pages(s, page_of(parts_.begins[s]), pages_up_to(parts_.lengths[s]));
    parts_.lengths[s] = parts_.begins[s] = 0;
    return status::ok;
  }

  /// Empties all sequences, as `open` does. Errors: cache_not_open.
  inline status reset() noexcept {
    if (!is_open()) return status::cache_not_open;
    const kv_view& v = parts_.view;
    for (index_t s = 0; s < v.sequences; ++s) parts_.lengths[s] = parts_.begins[s] = 0;
    if (!is_paged()) return status::ok;
    for (index_t i = 0; i < v.sequences * v.table_pages; ++i) parts_.table[i] = -1;
    for (index_t p = 0; p < v.pages; ++p) {
      parts_.references[p] = 0;
      parts_.free[p] = static_cast<std::int32_t>(v.pages - 1 - p);
    }
    *parts_.free_pages = v.pages;
    return status::ok;
  }

  /// Lets `to` hold the tokens of `from` instead of its own, in the same pages; whoever appends to a shared page copies it
  /// first. Errors: cache_not_open, cache_fork unless paged, cache_sequence, also if from == to.
  inline status fork(index_t from, index_t to) noexcept {
    if (!is_open()) return status::cache_not_open;
    if (!is_paged()) return status::cache_fork;
    if (!has(from) || !has(to) || from == to) return status::cache_sequence;
    reset(to);
    for (index_t i = 0; i < parts_.view.table_pages; ++i)
      if (const std::int32_t page = entry(to, i) = entry(from, i); page >= 0) ++parts_.references[page];
    parts_.lengths[to] = parts_.lengths[from], parts_.begins[to] = parts_.begins[from];
    return status::ok;
  }

 private:
  DIFFATTN_INLINE bool has(index_t s) const noexcept { return s >= 0 && s < parts_.view.sequences; }
  DIFFATTN_INLINE bool is_paged() const noexcept { return parts_.table != nullptr; }
  DIFFATTN_INLINE status check_sequence(index_t s) const noexcept {
    return !is_open() ? status::cache_not_open : has(s) ? status::ok : status::cache_sequence;
  }

  /// The page of a sequence, counted from its token 0, that token t belongs to; and the end of those of the tokens before t.
  DIFFATTN_INLINE index_t page_of(index_t t) const noexcept { return t / parts_.view.page_tokens; }
  DIFFATTN_INLINE index_t pages_up_to(index_t t) const noexcept { return page_of(t + parts_.view.page_tokens - 1); }
  /// The table entry of that page; -1 if the sequence holds none of its tokens.
  DIFFATTN_INLINE std::int32_t& entry(index_t s, index_t page) const noexcept {
    return parts_.table[s * parts_.view.table_pages + page % parts_.view.table_pages];
  }

  /// Takes the pages first … end - 1 from a sequence, the last one first: they will be taken in the order of the tokens again.
  inline void release_pages(index_t s, index_t first, index_t end) noexcept {
    while (end-- > first) {
      std::int32_t& page = entry(s, end);
      if (page >= 0 && --parts_.references[page] == 0) parts_.free[(*parts_.free_pages)++] = page;
      page = -1;
    }
  }

  /// Gives a sequence pages of its own for its next n tokens.
  inline void own_pages(index_t s, index_t n) noexcept {
    const index_t length = parts_.lengths[s], end = pages_up_to(length + n);
    for (index_t i = page_of(length); i < end; ++i) {
      std::int32_t& page = entry(s, i);
      const std::int32_t old = page;
      if (old >= 0 && parts_.references[old] == 1) continue;
      page = parts_.free[--*parts_.free_pages];
      parts_.references[page] = 1;
      if (old < 0) continue;
      --parts_.references[old];
      const kv_rows* const pools[] = {&parts_.view.keys, &parts_.view.values};
      for (const kv_rows* rows : pools)
        std::memcpy(cache::writable(*rows, page, 0, 0), rows->at(old, 0, 0), static_cast<std::size_t>(rows->page_stride));
    }
  }

  /// Can each of the sequences have pages of its own for n > 0 tokens?
  inline bool enough_pages(index_t batch, index_t n, const index_t* sequences) const noexcept {
    index_t needed = 0;
    for (int pass = 0; pass < 2; ++pass)  // counts, then clears the counters
      for (index_t b = 0; b < batch; ++b) {
        const index_t s = sequences ? sequences[b] : b, length = parts_.lengths[s];
        const std::int32_t page = entry(s, page_of(length));
        if (pass == 0) needed += pages_up_to(length + n) - page_of(length);
        if (page < 0) continue;
        // If all who share a page append to it, the last one keeps it.
        std::int32_t& writers = parts_.writers[page];
        writers = pass == 0 ? writers + 1 : 0;
        if (writers == parts_.references[page]) --needed;
      }
    return needed <= *parts_.free_pages;
  }

  /// Do the sequences exist, none of them twice?
  inline bool distinct_sequences(index_t batch, const index_t* sequences) const noexcept {
    index_t b = 0;
    for (; b < batch && has(sequences[b]) && !parts_.seen[sequences[b]]; ++b) parts_.seen[sequences[b]] = 1;
    const bool all = b == batch;
    while (b > 0) parts_.seen[sequences[--b]] = 0;
    return all;
  }

  template <class T>
  inline status check_append(const tensor_view<const T>& k, const tensor_view<const T>& v, const index_t* sequences,
                             const rope_view& rope) const noexcept {
    if (!is_open()) return status::cache_not_open;
    if (std::is_same_v<T, double> != (config_.keys == storage::f64)) return status::cache_storage;
    status s = checks::tensor(k, status::k_null, status::k_size, status::k_width_stride);
    if (s == status::ok) s = checks::tensor(v, status::v_null, status::v_size, status::v_width_stride);
    if (s != status::ok) return s;
    const kv_view& view = parts_.view;
    if (k.heads != view.keys.heads || k.width != view.keys.width) return status::cache_key_shape;
    if (v.heads != view.values.heads || v.width != view.values.width) return status::cache_value_shape;
    if (v.batch != k.batch || v.tokens != k.tokens) return status::cache_value_shape;
    if (!sequences && k.batch != view.sequences) return status::cache_sequence;
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(memory_.data);
    const checks::byte_range mine{at, at + memory_.bytes};
    if (checks::intersect(mine, checks::bytes_of(k)) || checks::intersect(mine, checks::bytes_of(v)))
      return status::cache_overlap;
    if (sequences && !distinct_sequences(k.batch, sequences)) return status::cache_sequence;
    if (rope.is_given())
      if (s = check(rope, k.width); s != status::ok) return s;
    for (index_t b = 0; b < k.batch; ++b) {
      const index_t i = sequences ? sequences[b] : b, length = parts_.lengths[i], end = length + k.tokens;
      if (rope.is_given() && !rope.holds(length, k.tokens)) return status::rope_position;
      // A page takes room as long as one of its tokens is held; only whole pages make some again.
      const index_t from = is_paged() ? page_of(parts_.begins[i]) * view.page_tokens : 0;
      if (end >= checks::limit / 64 || (config_.kind != kv_cache_kind::ring && end - from > config_.capacity))
        return status::cache_full;
    }
    return is_paged() && k.tokens > 0 && !enough_pages(k.batch, k.tokens, sequences) ? status::cache_no_page : status::ok;
  }

  /// Stores the heads of token t of entry b of x as those of token `position` of sequence s.
  template <class T>
  inline void write(const kv_rows& rows, index_t s, index_t position, const tensor_view<const T>& x, index_t b, index_t t,
                    const rope_view& rope) noexcept {
    using real = compute_type<T>;
    for (index_t h = 0; h < rows.heads; ++h) {
      const T* const from = x.at(b, t, h);
      unsigned char* const to = cache::writable(rows, parts_.view.page(s, position), h, position % parts_.view.page_tokens);
      const auto read = [&](index_t i, index_t n, real* block) { kernel::read_row(from + i, n, block); };
      if (!rope.is_given()) {
        simd::encode_row<real>(rows.type, rows.width, read, to);
        continue;
      }
      // The channels of a pair may lie far apart, so a 16-bit row is widened as a whole.
      const real* whole;
      if constexpr (std::is_same_v<T, real>)
        whole = from;
      else
        read(0, rows.width, parts_.row), whole = parts_.row;
      const auto rotate = [&](index_t i, index_t n, real* block) { rotated_channels(rope, position, whole, i, n, block); };
      simd::encode_row<real>(rows.type, rows.width, rotate, to);
    }
  }

  kv_cache_config config_;
  cache::parts parts_;
  workspace memory_;
};

DIFFATTN_ISA_NAMESPACE_END
