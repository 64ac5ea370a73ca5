// SPDX-License-Identifier: MIT
#pragma once

// The prefill schedule: cuts a call into tasks and gives each its memory.
//
// A unit is one batch entry's value head(s) with all differential heads that read them. Units are worked off in waves: first
// the values of a wave are packed, then its blocks of query rows are computed, each independent of every other. One worker
// takes one unit a wave, so only one head's values are packed at a time; several workers take enough units for even shares.

#include "../arguments.hpp"
#include "../kernel/block.hpp"
#include "../workspace.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace schedule {

/// Keys of one packing task: 8 chunks.
inline constexpr index_t pack_keys = 8 * kernel::chunk_keys;

/// Blocks of a wave for each worker, at least. Between waves the workers wait for each other and have to be woken, some 50 µs;
/// 256 blocks take more than 10 ms from 1024 keys on, and their packed values at most 8 MB (float, width 128) a worker.
inline constexpr index_t blocks_per_worker = 256;

/// Sizes of a call and the pieces of its workspace.
template <class T>
struct panel_plan {
  index_t d = 0, dv = 0, q_len = 0, kv_len = 0, heads = 0;
  index_t block_rows = 0;
  index_t row_blocks = 0;
  index_t units = 0;              ///< value units of one batch entry
  index_t wave_units = 0;         ///< units of a wave, over all batch entries
  index_t chunks = 0;             ///< packed chunks of a unit, at most
  index_t span = 0;               ///< keys whose weights a block keeps, at most
  index_t* first_head = nullptr;  ///< [units + 1] first differential head of each value unit
  T* packed = nullptr;            ///< [wave_units][chunks]
  bool* finite = nullptr;         ///< [wave_units][chunks]
  T* worker_memory = nullptr;
  std::size_t worker_elements = 0;
};

/// Does differential head h begin a unit: other values than the head before?
DIFFATTN_INLINE bool begins_unit(const head_map& heads, index_t h) noexcept {
  if (h == 0) return true;
  const head_indices here = heads[h], before = heads[h - 1];
  return here.value_1 != before.value_1 || here.value_2 != before.value_2;
}

/// Keys that some row of [first, last] sees.
DIFFATTN_INLINE key_range keys_of_rows(const attention_mask& mask, index_t q_len, index_t kv_len, index_t b, index_t first,
                                       index_t last) noexcept {
  return {visible_keys(mask, q_len, kv_len, b, first).begin, visible_keys(mask, q_len, kv_len, b, last).end};
}

/// The pieces of one worker's scratch, counted or carved.
template <int Maps, class T>
DIFFATTN_INLINE kernel::block_scratch<T> carve_scratch(const panel_plan<T>& p, arena& memory) noexcept {
  const auto take = [&](index_t n) { return memory.take<T>(static_cast<std::size_t>(n * p.block_rows)); };
  kernel::block_scratch<T> s;
  s.queries = take(Maps * p.d);
  s.weights = take(Maps == 1 ? kernel::chunk_keys : Maps * p.span);
  s.combined = Maps == 1 ? nullptr : take(kernel::chunk_keys);
  s.out = take(kernel::padded_channels(p.dv));
  return s;
}

/// Plans a call that `check` accepts; `memory` counts or carves.
template <int Maps, class T>
inline panel_plan<T> plan_panels(const forward_args<T>& a, index_t workers, arena& memory) noexcept {
  panel_plan<T> p;
  p.d = a.q.width, p.dv = a.out.width, p.q_len = a.q.tokens, p.kv_len = a.k.tokens, p.heads = a.heads.heads;
  if (a.q.batch == 0 || p.q_len == 0) return p;

  index_t most_heads = 1, run = 0;
  for (index_t h = 0; h < p.heads; ++h) {
    const bool starts = begins_unit(a.heads, h);
    run = starts ? 1 : run + 1;
    if (starts) ++p.units;
    if (run > most_heads) most_heads = run;
  }
  for (index_t b = 0; b < a.q.batch; ++b) {
    const key_range all = keys_of_rows(a.mask, p.q_len, p.kv_len, b, 0, p.q_len - 1);
    const index_t chunks = (kernel::weight_span(all.begin, all.end) + kernel::chunk_keys - 1) / kernel::chunk_keys;
    if (chunks > p.chunks) p.chunks = chunks;
  }
  // A window bounds what one block sees; otherwise it may see all that the call does.
  p.span = p.chunks * kernel::chunk_keys;
  if (a.mask.causal && a.mask.window != attention_mask::unlimited) {
    const index_t reach = kernel::chunk_keys + kernel::max_block_rows;
    if (a.mask.window < p.span - reach) p.span = a.mask.window + reach;
  }
  p.block_rows = kernel::block_rows(p.span * (Maps * p.d + p.dv) * static_cast<index_t>(sizeof(T)));
  p.row_blocks = (p.q_len + p.block_rows - 1) / p.block_rows;
  const index_t all_units = a.q.batch * p.units, unit_blocks = most_heads * p.row_blocks;
  p.wave_units = workers == 1 ? 1 : (workers * blocks_per_worker + unit_blocks - 1) / unit_blocks;
  if (p.wave_units > all_units) p.wave_units = all_units;

  p.first_head = memory.take<index_t>(static_cast<std::size_t>(p.units + 1));
  p.packed = memory.take<T>(static_cast<std::size_t>(p.wave_units * p.chunks * kernel::packed_chunk_size<T>(p.dv)));
  p.finite = memory.take<bool>(static_cast<std::size_t>(p.wave_units * p.chunks));
  arena one_worker;
  carve_scratch<Maps>(p, one_worker);
  p.worker_elements = one_worker.bytes() / sizeof(T);
  p.worker_memory = memory.take<T>(p.worker_elements, static_cast<std::size_t>(workers));
  return p;
}

/// Packs `pack_keys` keys of one unit, from chunk `first_chunk` + 8 · task on.
template <class T>
inline void pack_task(const forward_args<T>& a, const panel_plan<T>& p, index_t unit, index_t slot, index_t task) noexcept {
  const index_t b = unit / p.units;
  const head_indices head = a.heads[p.first_head[unit % p.units]];
  const key_range all = keys_of_rows(a.mask, p.q_len, p.kv_len, b, 0, p.q_len - 1);
  const index_t first_chunk = all.begin / kernel::chunk_keys;
  for (index_t i = 0; i < pack_keys / kernel::chunk_keys; ++i) {
    const index_t chunk = task * (pack_keys / kernel::chunk_keys) + i, key = (first_chunk + chunk) * kernel::chunk_keys;
    if (key >= all.end) return;
    const index_t begin = all.begin > key ? all.begin - key : 0;
    const index_t end = all.end - key < kernel::chunk_keys ? all.end - key : kernel::chunk_keys;
    p.finite[slot * p.chunks + chunk] = kernel::pack_values(
        a.v.at(b, key, head.value_1), head.value_2 < 0 ? nullptr : a.v.at(b, key, head.value_2), a.v.token_stride, a.v.width,
        begin, end, p.packed + (slot * p.chunks + chunk) * kernel::packed_chunk_size<T>(p.dv));
  }
}

/// Computes one block of rows of one head. Heads are outermost; under a causal mask the blocks with most keys come first.
template <int Maps, class T>
inline void block_task(const forward_args<T>& a, const panel_plan<T>& p, index_t first_unit, index_t task,
                       index_t worker) noexcept {
  index_t slot = 0, head = task / p.row_blocks;  // head counts from the first of the wave
  for (;; ++slot) {
    const index_t u = (first_unit + slot) % p.units, unit_heads = p.first_head[u + 1] - p.first_head[u];
    if (head < unit_heads) {
      head += p.first_head[u];
      break;
    }
    head -= unit_heads;
  }
  const index_t b = (first_unit + slot) / p.units;
  const index_t block = a.mask.causal ? p.row_blocks - 1 - task % p.row_blocks : task % p.row_blocks;
  const index_t row = block * p.block_rows;
  const head_indices i = a.heads[head];

  kernel::block_job<T> job;
  job.q[0] = a.q.at(b, row, i.query_1), job.q[1] = a.q.at(b, row, i.query_2);
  job.k[0] = a.k.at(b, 0, i.key_1), job.k[1] = a.k.at(b, 0, i.key_2);
  job.q_stride = a.q.token_stride, job.k_stride = a.k.token_stride;
  job.rows = p.q_len - row < p.block_rows ? p.q_len - row : p.block_rows, job.d = p.d, job.dv = p.dv;
  const double scale = a.scale == T(0) ? 1 / std::sqrt(static_cast<double>(p.d)) : static_cast<double>(a.scale);
  job.scale = static_cast<T>(scale * 1.44269504088896340736);  // log2 e
  key_range visible[kernel::max_block_rows];
  T alpha[kernel::max_block_rows], lambda[kernel::max_block_rows];
  for (index_t r = 0; r < job.rows; ++r) {
    visible[r] = visible_keys(a.mask, p.q_len, p.kv_len, b, row + r);
    if constexpr (Maps == 2) alpha[r] = a.alpha.at(b, row + r, head), lambda[r] = a.lambda.at(b, row + r, head);
  }
  job.visible = visible, job.alpha = alpha, job.lambda = lambda;
  job.packed = p.packed + slot * p.chunks * kernel::packed_chunk_size<T>(p.dv);
  job.finite = p.finite + slot * p.chunks;
  job.first_chunk = visible_keys(a.mask, p.q_len, p.kv_len, b, 0).begin / kernel::chunk_keys;
  job.norm = a.norm;
  job.out = a.out.at(b, row, head), job.out_stride = a.out.token_stride;
  const tensor_view<T>* const raw[2] = {&a.out1, &a.out2};
  const token_head_view<T>* const lse[2] = {&a.lse1, &a.lse2};
  for (int m = 0; m < 2; ++m) {
    job.raw[m] = raw[m]->data ? raw[m]->at(b, row, head) : nullptr, job.raw_stride[m] = raw[m]->token_stride;
    job.lse[m] = lse[m]->data ? &lse[m]->at(b, row, head) : nullptr, job.lse_stride[m] = lse[m]->token_stride;
  }
  arena memory(p.worker_memory + static_cast<std::size_t>(worker) * p.worker_elements);
  const kernel::block_scratch<T> scratch = carve_scratch<Maps>(p, memory);
  if (kernel::group_vectors<T>(job.rows, visible[job.rows - 1].end - visible[0].begin) == 1)
    kernel::attend_block<Maps, 1>(job, scratch);
  else
    kernel::attend_block<Maps, 2>(job, scratch);
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
  const panel_plan<T> p = plan_panels<Maps>(a, workers, memory);
  const index_t all_units = a.q.batch * p.units;
  for (index_t h = 0, u = 0; h < p.heads && all_units > 0; ++h)
    if (begins_unit(a.heads, h)) p.first_head[u++] = h;
  if (all_units > 0) p.first_head[p.units] = p.heads;

  const index_t pack_tasks = (p.chunks * kernel::chunk_keys + pack_keys - 1) / pack_keys;
  for (index_t first = 0; first < all_units; first += p.wave_units) {
    const index_t count = first + p.wave_units < all_units ? p.wave_units : all_units - first;
    index_t heads = 0;
    for (index_t u = first; u < first + count; ++u) heads += p.first_head[u % p.units + 1] - p.first_head[u % p.units];
    executor.run(count * pack_tasks, [&](index_t task, index_t) {
      pack_task(a, p, first + task / pack_tasks, task / pack_tasks, task % pack_tasks);
    });
    executor.run(heads * p.row_blocks, [&](index_t task, index_t worker) { block_task<Maps>(a, p, first, task, worker); });
  }
}

}  // namespace schedule
DIFFATTN_ISA_NAMESPACE_END
