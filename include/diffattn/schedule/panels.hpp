// SPDX-License-Identifier: MIT
#pragma once

// The prefill schedule: cuts a call into tasks and gives each its memory.
//
// A unit is one batch entry's value head(s) with all differential heads that read them. Units are worked off in waves: first
// the values of a wave are packed, then its blocks of query rows are computed, each independent of every other. One worker
// takes one unit a wave, so only one head's values are packed at a time; several workers take enough units for even shares.
// Keys are read where they lie if they are rows of the computing type in one piece; others are copied beside the values.

#include "../kernel/block.hpp"
#include "../kernel/rows.hpp"
#include "source.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace schedule {

/// Keys of one packing task: 8 chunks.
inline constexpr index_t pack_keys = 8 * kernel::chunk_keys;

/// Blocks of a wave for each worker, at least. Between waves the workers wait for each other and have to be woken, some 50 µs;
/// 256 blocks take more than 10 ms from 1024 keys on, and their packed values at most 8 MB (float, width 128) a worker.
inline constexpr index_t blocks_per_worker = 256;

/// Sizes of a call and the pieces of its workspace. R is the type it computes in.
template <class R>
struct panel_plan {
  index_t d = 0, dv = 0, width = 0, q_len = 0, heads = 0;
  index_t block_rows = 0;
  index_t row_blocks = 0;
  index_t units = 0;              ///< value units of one batch entry
  index_t wave_units = 0;         ///< units of a wave, over all batch entries
  bool hides = false;             ///< the logits' rules may hide keys
  index_t chunks = 0;             ///< packed chunks of a unit, at most
  index_t span = 0;               ///< keys whose weights a block keeps, at most
  index_t* first_head = nullptr;  ///< [units + 1] first differential head of each value unit
  R* packed = nullptr;            ///< [wave_units][chunks]
  bool* finite = nullptr;         ///< [wave_units][chunks]
  index_t key_heads = 0;          ///< key heads of a unit, at most, if keys are copied; else 0
  R* keys = nullptr;              ///< [wave_units][key_heads][chunks · chunk_keys][d]
  R* worker_memory = nullptr;
  std::size_t worker_elements = 0;

  /// Copied keys of one head, from the first chunk on.
  DIFFATTN_INLINE R* copied_keys(index_t slot, index_t place) const noexcept {
    return keys + (slot * key_heads + place) * chunks * kernel::chunk_keys * d;
  }
};

/// The pieces of one worker's scratch.
template <class R>
struct panel_scratch {
  kernel::block_scratch<R> block;
  R* values;   ///< [4][width] converted values
  R* queries;  ///< [maps][block rows][d] queries of another type than R, converted
  R* out;      ///< [block rows][dv] their outputs
};

template <int Maps, class T, class R = compute_type<T>>
DIFFATTN_INLINE panel_scratch<R> carve_scratch(const panel_plan<R>& p, arena& memory) noexcept {
  const auto take = [&](index_t n) { return memory.take<R>(static_cast<std::size_t>(n * p.block_rows)); };
  constexpr bool converts = !std::is_same_v<T, R>;
  panel_scratch<R> s;
  s.block.queries = take(Maps * p.d);
  s.block.weights = take(Maps == 1 ? kernel::chunk_keys : Maps * p.span);
  s.block.combined = Maps == 1 ? nullptr : take(kernel::chunk_keys);
  s.block.out = take(2 * kernel::padded_channels(p.dv));
  const index_t blocks = (Maps == 1 ? kernel::chunk_keys : p.span) / kernel::softmax_keys + 1;
  const index_t groups = (p.block_rows + simd::lanes<R> - 1) / simd::lanes<R>;
  s.block.live = memory.take<bool>(static_cast<std::size_t>(p.hides ? Maps * groups : 0), static_cast<std::size_t>(blocks));
  s.values = memory.take<R>(static_cast<std::size_t>(4 * p.width));
  s.queries = converts ? take(Maps * p.d) : nullptr;
  s.out = converts ? take(p.dv) : nullptr;
  return s;
}

/// Plans a call that `check` accepts; `memory` counts or carves.
template <int Maps, class T, class R = compute_type<T>>
inline panel_plan<R> plan_panels(const forward_args<T>& a, index_t workers, arena& memory) noexcept {
  const source from(a);
  panel_plan<R> p;
  p.d = a.q.width, p.dv = a.out.width, p.width = from.values().width, p.q_len = a.q.tokens, p.heads = a.heads.heads;
  if (a.q.batch == 0 || p.q_len == 0) return p;

  const unit_count n = count_units(a.heads);
  p.units = n.units;
  for (int m = 0; m < Maps; ++m)
    if (const auto* const r = rules_of_map(a, m)) p.hides |= r->hides();
  bool copies_keys = false;
  for (index_t b = 0; b < a.q.batch; ++b) {
    const key_range all = keys_of_rows(a.mask, p.q_len, from.length(b), b, 0, p.q_len - 1);
    const index_t chunks = most_pieces(all.end - all.begin, all.end, kernel::chunk_keys);
    if (chunks > p.chunks) p.chunks = chunks;
    copies_keys |= !from.is_tensor<R>(from.keys(), all.end);
  }
  if (copies_keys)
    for (index_t h = 0, begin = 0; h < p.heads; begin = h) {
      while (++h < p.heads && !begins_unit(a.heads, h)) {
      }
      for_each_key_head(a.heads, begin, h, [&](index_t, index_t place) {
        if (place >= p.key_heads) p.key_heads = place + 1;
      });
    }
  // A window bounds what one block sees, unless it takes in several sequences; otherwise it may see all that the call does.
  p.span = p.chunks * kernel::chunk_keys;
  if (a.mask.causal && a.mask.window != attention_mask::unlimited && !a.mask.prefixes && !a.mask.query_starts) {
    const index_t reach = kernel::chunk_keys + kernel::max_block_rows;
    if (a.mask.window < p.span - reach) p.span = a.mask.window + reach;
  }
  p.block_rows = kernel::block_rows(p.span * (Maps * p.d + p.dv) * static_cast<index_t>(sizeof(R)));
  p.row_blocks = (p.q_len + p.block_rows - 1) / p.block_rows;
  const index_t all_units = a.q.batch * p.units, unit_blocks = n.most_heads * p.row_blocks;
  p.wave_units = workers == 1 ? 1 : (workers * blocks_per_worker + unit_blocks - 1) / unit_blocks;
  if (p.wave_units > all_units) p.wave_units = all_units;

  p.first_head = memory.take<index_t>(static_cast<std::size_t>(p.units + 1));
  p.packed = memory.take<R>(static_cast<std::size_t>(p.wave_units * p.chunks * kernel::packed_chunk_size<R>(p.dv)));
  p.finite = memory.take<bool>(static_cast<std::size_t>(p.wave_units * p.chunks));
  p.keys = memory.take<R>(static_cast<std::size_t>(p.wave_units * p.chunks * kernel::chunk_keys),
                          static_cast<std::size_t>(p.key_heads * p.d));
  arena one_worker;
  carve_scratch<Maps, T>(p, one_worker);
  p.worker_elements = one_worker.bytes() / sizeof(R);
  p.worker_memory = memory.take<R>(p.worker_elements, static_cast<std::size_t>(workers));
  return p;
}

/// Packs `pack_keys` keys of one unit, from chunk `first_chunk` + 8 · task on.
template <int Maps, class T, class R = compute_type<T>>
inline void pack_task(const forward_args<T>& a, const panel_plan<R>& p, index_t unit, index_t slot, index_t task,
                      index_t worker) noexcept {
  const source from(a);
  const index_t b = unit / p.units, first_head = p.first_head[unit % p.units], last_head = p.first_head[unit % p.units + 1];
  const head_indices head = a.heads[first_head];
  const key_range all = keys_of_rows(a.mask, p.q_len, from.length(b), b, 0, p.q_len - 1);
  const index_t first_chunk = all.begin / kernel::chunk_keys;
  arena memory(p.worker_memory + static_cast<std::size_t>(worker) * p.worker_elements);
  R* const converted = carve_scratch<Maps, T>(p, memory).values;
  const bool in_place = from.is_tensor<R>(from.values(), all.end);
  const bool copies_keys = !from.is_tensor<R>(from.keys(), all.end);
  for (index_t i = 0; i < pack_keys / kernel::chunk_keys; ++i) {
    const index_t chunk = task * (pack_keys / kernel::chunk_keys) + i, key = (first_chunk + chunk) * kernel::chunk_keys;
    if (key >= all.end) return;
    const index_t begin = all.begin > key ? all.begin - key : 0;
    const index_t end = all.end - key < kernel::chunk_keys ? all.end - key : kernel::chunk_keys;
    const unsigned char* rows[kernel::chunk_keys];
    const auto value_rows = [&](int half, index_t at, index_t count) -> kernel::strided_rows<R> {
      const index_t value_head = half == 0 ? head.value_1 : head.value_2;
      from.find(from.values(), b, value_head, key + at, count, rows);
      if (in_place) {
        const index_t stride = from.values().token_stride / static_cast<index_t>(sizeof(R));
        const R* const row = reinterpret_cast<const R*>(rows[0]);
        // The same head of the next token lies behind all other heads, too far for the hardware to fetch ahead.
        for (index_t next = 0; next < count; ++next)
          for (index_t c = 0; c < p.width; c += static_cast<index_t>(64 / sizeof(R)))
            simd::prefetch(row + (next + 8) * stride + c);
        return {row, stride};
      }
      for (index_t r = 0; r < count; ++r) simd::decode_row<R>(from.values().type, rows[r], p.width, converted + r * p.width);
      return {converted, p.width};
    };
    p.finite[slot * p.chunks + chunk] =
        kernel::pack_values<R>(head.value_2 < 0 ? 1 : 2, p.width, begin, end, value_rows,
                               p.packed + (slot * p.chunks + chunk) * kernel::packed_chunk_size<R>(p.dv));
    if (!copies_keys) continue;
    for_each_key_head(a.heads, first_head, last_head, [&](index_t key_head, index_t place) {
      from.find(from.keys(), b, key_head, key + begin, end - begin, rows);
      R* const to = p.copied_keys(slot, place) + (chunk * kernel::chunk_keys + begin) * p.d;
      for (index_t r = 0; r < end - begin; ++r) simd::decode_row<R>(from.keys().type, rows[r], p.d, to + r * p.d);
    });
  }
}

/// Computes one block of rows of one head. Heads are outermost; under a causal mask the blocks with most keys come first.
template <int Maps, class T, class R = compute_type<T>>
inline void block_task(const forward_args<T>& a, const panel_plan<R>& p, index_t first_unit, index_t task,
                       index_t worker) noexcept {
  index_t slot = 0, head = task / p.row_blocks;  // head counts from the first of the wave
  index_t unit = first_unit % p.units;
  for (index_t heads; heads = p.first_head[unit + 1] - p.first_head[unit], head >= heads; unit = (first_unit + slot) % p.units)
    head -= heads, ++slot;
  head += p.first_head[unit];
  const index_t b = (first_unit + slot) / p.units;
  const index_t block = a.mask.causal ? p.row_blocks - 1 - task % p.row_blocks : task % p.row_blocks;
  const index_t row = block * p.block_rows;
  const head_indices i = a.heads[head];

  const source from(a);
  const index_t kv_len = from.length(b);
  const key_range all = keys_of_rows(a.mask, p.q_len, kv_len, b, 0, p.q_len - 1);
  arena memory(p.worker_memory + static_cast<std::size_t>(worker) * p.worker_elements);
  const panel_scratch<R> scratch = carve_scratch<Maps, T>(p, memory);

  kernel::block_job<R> job{};
  job.rows = p.q_len - row < p.block_rows ? p.q_len - row : p.block_rows, job.d = p.d, job.dv = p.dv;
  job.scale = log2_scale(a);
  job.first_chunk = all.begin / kernel::chunk_keys;
  const bool in_place = from.is_tensor<R>(from.keys(), all.end);
  job.first_key = in_place ? all.begin : job.first_chunk * kernel::chunk_keys;
  job.k_stride = in_place ? from.keys().token_stride / static_cast<index_t>(sizeof(R)) : p.d;
  for (int map = 0; map < Maps; ++map) {
    const T* const q = a.q.at(b, row, map == 0 ? i.query_1 : i.query_2);
    const index_t key = map == 0 ? i.key_1 : i.key_2;
    if constexpr (std::is_same_v<T, R>) {
      job.q[map] = q, job.q_stride = a.q.token_stride;
    } else {
      R* const to = scratch.queries + map * p.block_rows * p.d;
      for (index_t r = 0; r < job.rows; ++r) kernel::read_row(q + r * a.q.token_stride, p.d, to + r * p.d);
      job.q[map] = to, job.q_stride = p.d;
    }
    if (in_place && all.begin < all.end) {
      const unsigned char* first;
      from.find(from.keys(), b, key, all.begin, 1, &first);
      job.k[map] = reinterpret_cast<const R*>(first);
    }
    if (!in_place)
      for_each_key_head(a.heads, p.first_head[unit], p.first_head[unit + 1], [&](index_t key_head, index_t place) {
        if (key_head == key) job.k[map] = p.copied_keys(slot, place);
      });
  }
  key_range visible[kernel::max_block_rows];
  R alpha[kernel::max_block_rows], lambda[kernel::max_block_rows];
  index_t own[kernel::max_block_rows];
  for (int m = 0; m < 2; ++m) job.rules[m] = {rules_of_map(a, m), b, head};
  for (index_t r = 0; r < job.rows; ++r) {
    own[r] = place_of_row(a.mask, p.q_len, kv_len, b, row + r).own;
    visible[r] = visible_keys(a.mask, p.q_len, kv_len, b, row + r);
    if constexpr (Maps == 2) alpha[r] = a.alpha.at(b, row + r, head), lambda[r] = a.lambda.at(b, row + r, head);
  }
  job.visible = visible, job.first_query = row, job.own = own, job.alpha = alpha, job.lambda = lambda;
  job.packed = p.packed + slot * p.chunks * kernel::packed_chunk_size<R>(p.dv);
  job.finite = p.finite + slot * p.chunks;
  job.norm = a.norm;
  if constexpr (std::is_same_v<T, R>)
    job.out = a.out.at(b, row, head), job.out_stride = a.out.token_stride;
  else
    job.out = scratch.out, job.out_stride = p.dv;
  const tensor_view<R>* const raw[2] = {&a.out1, &a.out2};
  const token_head_view<R>* const lse[2] = {&a.lse1, &a.lse2};
  for (int m = 0; m < 2; ++m) {
    job.raw[m] = raw[m]->data ? raw[m]->at(b, row, head) : nullptr, job.raw_stride[m] = raw[m]->token_stride;
    job.lse[m] = lse[m]->data ? &lse[m]->at(b, row, head) : nullptr, job.lse_stride[m] = lse[m]->token_stride;
  }
  if (kernel::group_vectors<R>(job.rows, visible[job.rows - 1].end - visible[0].begin) == 1)
    kernel::attend_block<Maps, 1>(job, scratch.block);
  else
    kernel::attend_block<Maps, 2>(job, scratch.block);
  if constexpr (!std::is_same_v<T, R>)
    for (index_t r = 0; r < job.rows; ++r) kernel::write_row(scratch.out + r * p.dv, p.dv, a.out.at(b, row + r, head));
}

template <int Maps, class T>
inline std::size_t panels_bytes(const forward_args<T>& a, index_t workers) noexcept {
  arena count;
  plan_panels<Maps>(a, workers, count);
  return count.bytes();
}

template <int Maps, class T, class Executor>
inline void run_panels(const forward_args<T>& a, workspace w, Executor& executor, index_t workers) {
  arena memory(w.data);
  const panel_plan<compute_type<T>> p = plan_panels<Maps>(a, workers, memory);
  const index_t all_units = a.q.batch * p.units;
  if (all_units > 0) list_units(a.heads, p.first_head);

  const index_t pack_tasks = (p.chunks * kernel::chunk_keys + pack_keys - 1) / pack_keys;
  for (index_t first = 0; first < all_units; first += p.wave_units) {
    const index_t count = first + p.wave_units < all_units ? p.wave_units : all_units - first;
    index_t heads = 0;
    for (index_t u = first; u < first + count; ++u) heads += p.first_head[u % p.units + 1] - p.first_head[u % p.units];
    executor.run(count * pack_tasks, [&](index_t task, index_t worker) {
      pack_task<Maps>(a, p, first + task / pack_tasks, task / pack_tasks, task % pack_tasks, worker);
    });
    executor.run(heads * p.row_blocks, [&](index_t task, index_t worker) { block_task<Maps>(a, p, first, task, worker); });
  }
}

}  // namespace schedule
DIFFATTN_ISA_NAMESPACE_END
