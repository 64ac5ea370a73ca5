// SPDX-License-Identifier: MIT
#pragma once

// What the schedules share: where a call's keys and values are, and which heads read them.
//
// A unit is one batch entry's value head(s) with all differential heads that read them: with grouped queries, keys and values
// are read once for a unit.

#include "../arguments.hpp"
#include "../workspace.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace schedule {

/// Keys and values of a call.
class source {
 public:
  template <class T>
  DIFFATTN_INLINE explicit source(const forward_args<T>& a) noexcept
      : view_(a.cache.is_given() ? a.cache : view_of_tensors<T>(a.k, a.v)),
        sequences_(a.sequences),
        is_cache_(a.cache.is_given()) {}

  DIFFATTN_INLINE bool is_cache() const noexcept { return is_cache_; }

  DIFFATTN_INLINE const kv_rows& keys() const noexcept { return view_.keys; }
  DIFFATTN_INLINE const kv_rows& values() const noexcept { return view_.values; }
  /// The sequence of batch entry b, and how many keys it has.
  DIFFATTN_INLINE index_t sequence(index_t b) const noexcept { return sequences_ ? sequences_[b] : b; }
  DIFFATTN_INLINE index_t length(index_t b) const noexcept { return view_.length(sequence(b)); }

  /// The row of one token, and how many tokens from it on lie in the same page.
  DIFFATTN_INLINE const unsigned char* find(const kv_rows& of, index_t b, index_t head, index_t token,
                                            index_t& in_page) const noexcept {
    const index_t row = token % view_.page_tokens;
    in_page = view_.page_tokens - row;
    return of.at(view_.page(sequence(b), token), head, row);
  }
  /// Where the rows of tokens [token, token + count) of one head begin.
  DIFFATTN_INLINE void find(const kv_rows& of, index_t b, index_t head, index_t token, index_t count,
                            const unsigned char** rows) const noexcept {
    for (index_t i = 0, in_page; i < count;) {
      const unsigned char* at = find(of, b, head, token + i, in_page);
      for (; in_page > 0 && i < count; --in_page, ++i, at += of.token_stride) rows[i] = at;
    }
  }

  /// Do the rows of tokens [0, end) follow each other, as numbers of T where those may lie? Then a kernel can take them for a
  /// tensor.
  template <class T>
  DIFFATTN_INLINE bool is_tensor(const kv_rows& of, index_t end) const noexcept {
    constexpr index_t size = static_cast<index_t>(sizeof(T));
    const bool aligned = reinterpret_cast<std::uintptr_t>(of.data) % sizeof(T) == 0 && of.page_stride % size == 0 &&
                         of.head_stride % size == 0 && of.token_stride % size == 0;
    return of.type == storage_of<T> && aligned && end <= view_.page_tokens;
  }

 private:
  kv_view view_;
  const index_t* sequences_;
  bool is_cache_;
};

/// Pieces of `size` keys, counted from key 0, that any `keys` keys before `end` may touch. Never less for more keys: so the
/// memory of a call bounds that of every call like it with fewer.
constexpr index_t most_pieces(index_t keys, index_t end, index_t size) noexcept {
  const index_t anywhere = (keys + 2 * (size - 1)) / size, before_end = (end + size - 1) / size;
  return keys <= 0 ? 0 : anywhere < before_end ? anywhere : before_end;
}

/// The same call with `kv_len` tokens in every sequence of its cache, none forgotten, none padding, the last query at the last
/// token: the most that it may come to need.
template <class T>
DIFFATTN_INLINE forward_args<T> with_length(const forward_args<T>& a, index_t kv_len) noexcept {
  forward_args<T> longest = a;
  longest.cache.lengths = longest.cache.begins = nullptr, longest.cache.same_length = kv_len;
  longest.mask.key_ranges = nullptr, longest.mask.offset = attention_mask::align_to_end;
  if (a.mask.prefixes) longest.mask.window = attention_mask::unlimited;  // it may leave less of a prefix at the end than before
  return longest;
}

/// Keys that some query row of batch entry b sees among rows [first, last].
DIFFATTN_INLINE key_range keys_of_rows(const attention_mask& mask, index_t q_len, index_t kv_len, index_t b, index_t first,
                                       index_t last) noexcept {
  return {visible_keys(mask, q_len, kv_len, b, first).begin, visible_keys(mask, q_len, kv_len, b, last).end};
}

/// The rules of map m, or null if there are none.
template <class T>
DIFFATTN_INLINE const logit_rules<compute_type<T>>* rules_of_map(const forward_args<T>& a, int m) noexcept {
  const logit_rules<compute_type<T>>* const r = m == 1 && a.logits_2 ? a.logits_2 : &a.logits;
  return r->changes() || r->hides() || r->sinks ? r : nullptr;
}

/// Factor of the scores in log2 units: scale · log2 e.
template <class T>
DIFFATTN_INLINE compute_type<T> log2_scale(const forward_args<T>& a) noexcept {
  const double scale = a.scale == 0 ? 1 / std::sqrt(static_cast<double>(a.q.width)) : static_cast<double>(a.scale);
  return static_cast<compute_type<T>>(scale * 1.44269504088896340736);
}

/// Does differential head h begin a unit: other values than the head before?
DIFFATTN_INLINE bool begins_unit(const head_map& heads, index_t h) noexcept {
  if (h == 0) return true;
  const head_indices here = heads[h], before = heads[h - 1];
  return here.value_1 != before.value_1 || here.value_2 != before.value_2;
}

/// f(key head, place) for the key heads that heads [begin, end) read, each once, in the order of first use.
template <class F>
DIFFATTN_INLINE void for_each_key_head(const head_map& heads, index_t begin, index_t end, F&& f) noexcept {
  const auto key_of = [&](index_t i) { return i % 2 == 0 ? heads[i / 2].key_1 : heads[i / 2].key_2; };
  for (index_t i = 2 * begin, place = 0; i < 2 * end; ++i) {
    bool is_new = true;
    for (index_t j = 2 * begin; j < i && is_new; ++j) is_new = key_of(j) != key_of(i);
    if (is_new) f(key_of(i), place++);
  }
}

/// Units of one batch entry, and the heads of the largest.
struct unit_count {
  index_t units = 0, most_heads = 0;
};

DIFFATTN_INLINE unit_count count_units(const head_map& heads) noexcept {
  unit_count n;
  index_t run = 0;
  for (index_t h = 0; h < heads.heads; ++h) {
    const bool starts = begins_unit(heads, h);
    run = starts ? 1 : run + 1;
    if (starts) ++n.units;
    if (run > n.most_heads) n.most_heads = run;
  }
  return n;
}

/// The first head of each unit, and behind the last unit the number of heads.
DIFFATTN_INLINE void list_units(const head_map& heads, index_t* first_head) noexcept {
  index_t u = 0;
  for (index_t h = 0; h < heads.heads; ++h)
    if (begins_unit(heads, h)) first_head[u++] = h;
  first_head[u] = heads.heads;
}

}  // namespace schedule
DIFFATTN_ISA_NAMESPACE_END
