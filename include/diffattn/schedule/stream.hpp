// SPDX-License-Identifier: MIT
#pragma once

// The decode schedule: few query rows, many keys. Every byte of the keys and values is read once, by all rows of all heads that
// share it, and nothing else is large: the speed is that of memory.
//
//   for each part of 1024 keys:   scores of all rows · softmax within the part                 (keys are read)
//   merge the parts' sums, mix the maps' coefficients
//   for each part of 1024 keys:   combine the weights of both maps · add up weighted values    (values are read)
//   add up the parts, norm, store
//
// Parts are cut at multiples of 1024 tokens, whatever the call: so the result is the same, bit for bit, for any number of
// threads, any batch, any number of query rows in a call, and any kind of cache.

#include "../kernel/dots.hpp"
#include "../kernel/epilogue.hpp"
#include "../kernel/row_softmax.hpp"
#include "../kernel/rules.hpp"
#include "../kernel/sums.hpp"
#include "lines.hpp"
#include "source.hpp"

DIFFATTN_ISA_NAMESPACE_BEGIN
namespace schedule {

using kernel::padded_row;
using kernel::round_up;

/// Keys of a part: with float rows of 64 numbers a part is 1 MB of keys and values, 40 µs of reading; what is done once for a
/// part vanishes beside that.
inline constexpr index_t part_keys = 1024;

/// Keys of a kernel call, at most: what is done between two calls vanishes beside their reading.
inline constexpr index_t turn_keys = 64;

/// Pages of fewer tokens are gathered: a score tile takes this many keys.
inline constexpr index_t least_run = kernel::unpacked_rows;

/// Bytes from a row that is used to the one that is fetched: a memory page, where the hardware stops by itself.
inline constexpr index_t fetch_distance = 4096;

/// Units for each worker from which on whole units are dealt out; below, their parts are.
inline constexpr index_t units_per_worker = 4;

/// Memory of one unit. A row is a line and a query row; an output is a kind (the result, the raw product of a map), a head and
/// a query row.
template <class R>
struct stream_unit {
  stream_lines lines;
  R* queries;                    ///< [rows][padded d], in log2 units
  R* weights;                    ///< [rows][parts · part_keys]
  R* shift;                      ///< [rows][parts]; once merged, the factors of the parts
  R* sum;                        ///< [rows][parts]
  kernel::row_total<R>* total;   ///< [rows]
  kernel::coefficients<R>* mix;  ///< [outputs]
  R* out;                        ///< [parts][outputs][padded dv]
};

/// Memory of one worker.
template <class R>
struct stream_scratch {
  R* wide;                  ///< [unpacked_rows][padded width] converted rows of keys or values
  unsigned char* gathered;  ///< [turn_keys][row bytes] of small pages
  R* combined;              ///< [outputs][turn_keys]
  R* turn;                  ///< [outputs][padded dv] sums of one turn
  R* lanes;                 ///< [dv][lanes] finished outputs
  R* finished;              ///< [lanes][dv]
};

template <int Maps, class T>
class stream_call {
 public:
  using real = compute_type<T>;

  /// Plans a call that `check` accepts; `memory` counts or carves.
  inline stream_call(const forward_args<T>& args, index_t workers, arena& memory) noexcept : a_(args), from_(args) {
    d_ = a_.q.width, width_ = from_.values().width, dv_ = a_.out.width, q_len_ = a_.q.tokens;
    padded_dv_ = dv_ / width_ * padded_row(width_);
    if (a_.out1.data) map_of_kind_[kinds_++] = 0;
    if (a_.out2.data) map_of_kind_[kinds_++] = 1;
    for (int m = 0; m < Maps; ++m)
      if (const auto* const r = rules_of_map(a_, m)) has_rules_ = true, hides_ |= r->hides();
    if (a_.q.batch == 0 || q_len_ == 0) return;
    const unit_count n = count_units(a_.heads);
    units_ = n.units, most_heads_ = n.most_heads;
    for (index_t b = 0; b < a_.q.batch; ++b) {
      const key_range keys = keys_of(b);
      const index_t parts = most_pieces(keys.end - keys.begin, keys.end, part_keys);
      if (parts > parts_) parts_ = parts;
    }
    const index_t all = a_.q.batch * units_;
    split_ = workers > 1 && parts_ > 1 && all < workers * units_per_worker;
    unit_slots_ = split_ || all < workers ? all : workers;
    first_head_ = memory.take<index_t>(static_cast<std::size_t>(units_ + 1));
    arena unit, worker;
    carve_unit(unit), carve_scratch(worker);
    unit_bytes_ = unit.bytes(), worker_bytes_ = worker.bytes();
    unit_memory_ = memory.take<unsigned char>(unit_bytes_, static_cast<std::size_t>(unit_slots_));
    worker_memory_ = memory.take<unsigned char>(worker_bytes_, static_cast<std::size_t>(workers));
  }

  template <class Executor>
  inline void run(Executor& executor) noexcept {
    const index_t all = a_.q.batch * units_;
    if (all == 0) return;
    list_units(a_.heads, first_head_);
    if (!split_) {
      executor.run(all, [this, all](index_t u, index_t worker) {
        const stream_unit<real> unit = unit_at(unit_slots_ == all ? u : worker);
        const stream_scratch<real> scratch = scratch_at(worker);
        const key_range parts = parts_of(u / units_);
        start(u, unit);
        for (index_t p = parts.begin; p < parts.end; ++p) score(u, p, unit, scratch);
        merge(u, unit);
        for (index_t p = parts.begin; p < parts.end; ++p) add_values(u, p, unit, scratch);
        finish(u, unit, scratch);
      });
      return;
    }
    const auto each_part = [&, this](auto&& f) {
      executor.run(all * parts_, [&, this](index_t task, index_t worker) {
        const index_t u = task / parts_, part = parts_of(u / units_).begin + task % parts_;
        if (part < parts_of(u / units_).end) f(u, part, unit_at(u), scratch_at(worker));
      });
    };
    // Between the rounds the calling thread does what takes microseconds.
    for (index_t u = 0; u < all; ++u) start(u, unit_at(u));
    each_part([this](index_t u, index_t part, auto&& unit, auto&& scratch) { score(u, part, unit, scratch); });
    for (index_t u = 0; u < all; ++u) merge(u, unit_at(u));
    each_part([this](index_t u, index_t part, auto&& unit, auto&& scratch) { add_values(u, part, unit, scratch); });
    for (index_t u = 0; u < all; ++u) finish(u, unit_at(u), scratch_at(0));
  }

 private:
  static constexpr int no_map = -1;

  /// Keys that rows of batch entry b see.
  key_range keys_of(index_t b) const noexcept { return keys_of_rows(a_.mask, q_len_, from_.length(b), b, 0, q_len_ - 1); }
  /// Parts [begin, end) that hold them.
  key_range parts_of(index_t b) const noexcept {
    const key_range keys = keys_of(b);
    if (keys.begin >= keys.end) return {0, 0};
    return {keys.begin / part_keys, (keys.end - 1) / part_keys + 1};
  }
  key_range seen(index_t b, index_t row) const noexcept { return visible_keys(a_.mask, q_len_, from_.length(b), b, row); }
  index_t first_head(index_t u) const noexcept { return first_head_[u % units_]; }
  index_t heads(index_t u) const noexcept { return first_head_[u % units_ + 1] - first_head_[u % units_]; }
  index_t outputs(index_t u) const noexcept { return kinds_ * heads(u) * q_len_; }

  /// Lists the lines of unit u and packs its queries.
  inline void start(index_t u, const stream_unit<real>& unit) const noexcept {
    unit.lines.list(a_.heads, first_head(u), first_head(u) + heads(u), Maps, has_rules_);
    const real scale = log2_scale(a_);
    real* q = unit.queries;
    for (index_t l = 0; l < *unit.lines.count; ++l)
      for (index_t i = 0; i < q_len_; ++i, q += padded_row(d_)) {
        kernel::read_row(a_.q.at(u / units_, i, unit.lines.lines[l].query), d_, q);
        for (index_t c = 0; c < d_; ++c) q[c] *= scale;
        for (index_t c = d_; c < padded_row(d_); ++c) q[c] = real(0);
      }
    for (index_t e = 0; e < (parts_ > 0 ? parts_ : 1) * outputs(u) * padded_dv_; ++e) unit.out[e] = real(0);
  }

  /// f(keys, run) for the keys of a part that the entry sees, at most to the next multiple of turn_keys, and their rows in one
  /// head.
  template <class F>
  inline void for_each_run(index_t b, index_t part, const kv_rows& of, index_t head, unsigned char* gathered,
                           F&& f) const noexcept {
    const key_range all = keys_of(b), keys = clip(all, part * part_keys, (part + 1) * part_keys);
    const index_t bytes = row_bytes(of.type, of.width), ahead = (fetch_distance + bytes - 1) / bytes;
    for (key_range now{keys.begin, keys.begin}; now.begin < keys.end; now.begin = now.end) {
      now.end = now.begin / turn_keys * turn_keys + turn_keys;
      if (now.end > keys.end) now.end = keys.end;
      index_t in_page;
      kernel::row_run run{from_.find(of, b, head, now.begin, in_page), of.token_stride, now.end - now.begin};
      if (in_page < run.count && in_page < least_run) {
        run.data = gathered, run.stride = bytes;
        for (index_t i = 0; i < run.count; ++i)
          std::memcpy(gathered + i * bytes, from_.find(of, b, head, now.begin + i, in_page), static_cast<std::size_t>(bytes));
      } else {
        if (in_page < run.count) run.count = in_page, now.end = now.begin + in_page;
        const index_t next = now.begin + ahead < now.end || in_page > ahead ? now.begin + ahead : now.end;
        if (next < all.end) run.ahead = from_.find(of, b, head, next, in_page) - run.data;
      }
      f(now, run);
    }
  }

  /// Scores of one part of the keys for all rows of a unit, and their weights.
  inline void score(index_t u, index_t part, const stream_unit<real>& unit,
                    const stream_scratch<real>& scratch) const noexcept {
    const index_t b = u / units_, at = part * part_keys, place = part - parts_of(b).begin, stride = parts_ * part_keys;
    const stream_line* const lines = unit.lines.lines;
    for (index_t l = 0, next = 0; l < *unit.lines.count; l = next) {
      while (next < *unit.lines.count && lines[next].key == lines[l].key) ++next;
      const index_t rows = (next - l) * q_len_;
      const real* const queries = unit.queries + l * q_len_ * padded_row(d_);
      real* const weights = unit.weights + l * q_len_ * stride + place * part_keys;
      for_each_run(b, part, from_.keys(), lines[l].key, scratch.gathered, [&](key_range keys, const kernel::row_run& run) {
        if (!some_see(u, unit, l, next, keys)) return;
        kernel::with_rows(
            from_.keys().type, run, d_, rows, scratch.wide, [&](auto type, const kernel::row_run& some, index_t first) {
              kernel::dots<type()>(queries, padded_row(d_), rows, some, d_, weights + (keys.begin - at) + first, stride);
            });
      });
    }
    for (index_t row = 0; row < *unit.lines.count * q_len_; ++row) {
      const key_range all = seen(b, row % q_len_), here = clip(all, at, at + part_keys);
      if (here.begin < here.end)
        edit(rules(b, lines[row / q_len_]), b, row % q_len_, here, at, unit.weights + row * stride + place * part_keys);
      kernel::row_weights(unit.weights + row * stride + place * part_keys, here.begin - at, here.end - at,
                          here.begin == all.begin && here.end == all.end, unit.shift[row * parts_ + place],
                          unit.sum[row * parts_ + place]);
    }
  }

  kernel::head_rules<real> rules(index_t b, const stream_line& line) const noexcept {
    return {rules_of_map(a_, line.map), b, line.head};
  }
  /// Do the rules show one of `keys` to a row of lines [begin, end)?
  bool some_see(index_t u, const stream_unit<real>& unit, index_t begin, index_t end, key_range keys) const noexcept {
    for (index_t l = begin; l < end; ++l)
      if (kernel::sight_of(rules(u / units_, unit.lines.lines[l]), 0, q_len_ - 1, keys) != sight::none) return true;
    return false;
  }

  /// Makes of the scores of query row i for `keys`, at x[key - origin], what the rules say.
  inline void edit(const kernel::head_rules<real>& r, index_t b, index_t i, key_range keys, index_t origin,
                   real* x) const noexcept {
    if (!r.rules) return;
    constexpr index_t w = simd::lanes<real>;
    const kernel::score_editor<real> editor(r);
    const logit_view<real>& bias = r.rules->bias;
    const index_t own = place_of_row(a_.mask, q_len_, from_.length(b), b, i).own;
    for (index_t key = keys.begin; key < keys.end; key += w) {
      const index_t n = keys.end - key < w ? keys.end - key : w;
      real distance[w] = {}, added[w] = {}, score[w] = {};
      for (index_t j = 0; j < n; ++j) {
        distance[j] = static_cast<real>(own - key - j), score[j] = x[key - origin + j];
        if (bias.data) added[j] = *bias.at(r.b, r.head, i, key + j);
      }
      simd::store(score, editor.edit(simd::load(score), simd::load(distance), simd::load(added)));
      for (index_t j = 0; j < n; ++j) x[key - origin + j] = score[j];
    }
    if (r.rules->hides()) kernel::hide_from_row(r, i, keys, x + (keys.begin - origin), 1);
  }

  /// Merges the parts of every row, stores the log-sum-exps, and finds the coefficients of every output.
  inline void merge(index_t u, const stream_unit<real>& unit) const noexcept {
    const index_t b = u / units_, parts = parts_of(b).end - parts_of(b).begin;
    const token_head_view<real>* const lse[2] = {&a_.lse1, &a_.lse2};
    for (index_t row = 0; row < *unit.lines.count * q_len_; ++row)
      unit.total[row] = kernel::merge_parts(unit.shift + row * parts_, unit.sum + row * parts_, parts);
    for (index_t h = 0; h < heads(u); ++h)
      for (index_t i = 0; i < q_len_; ++i) {
        kernel::row_total<real> map[2];
        for (int m = 0; m < Maps; ++m) {
          map[m] = unit.total[unit.lines.map[m][h] * q_len_ + i];
          const kernel::head_rules<real> r{rules_of_map(a_, m), b, first_head(u) + h};
          kernel::add_sink(r.sink(), map[m].sum, map[m].shift);
          if (lse[m]->data) lse[m]->at(b, i, first_head(u) + h) = map[m].log_sum_exp();
        }
        for (index_t kind = 0; kind < kinds_; ++kind) {
          const int only = map_of_kind_[kind];
          kernel::coefficients<real>& mix = unit.mix[(kind * heads(u) + h) * q_len_ + i];
          if (only != no_map)
            mix = kernel::take_map(map[only].sum);
          else
            mix = kernel::mix_maps(a_.alpha.at(b, i, first_head(u) + h), a_.lambda.at(b, i, first_head(u) + h), map[0].sum,
                                   map[1].sum);
        }
      }
  }

  /// Weighted values of one part for all outputs of a unit.
  inline void add_values(index_t u, index_t part, const stream_unit<real>& unit,
                         const stream_scratch<real>& scratch) const noexcept {
    const index_t place = part - parts_of(u / units_).begin, size = outputs(u) * padded_dv_;
    real* const out = unit.out + place * size;
    add_part(u, part, unit, scratch, out, false);
    // A value that a row may not see must not be multiplied, not even by 0: it may be infinite or NaN. What rules hide is
    // scattered, so it is multiplied all the same, and where the result gives it away the part is done again without.
    bool finite = true;
    for (index_t e = 0; hides_ && e < size; ++e) finite &= out[e] - out[e] == real(0);
    if (finite) return;
    for (index_t e = 0; e < size; ++e) out[e] = real(0);
    add_part(u, part, unit, scratch, out, true);
  }
  inline void add_part(index_t u, index_t part, const stream_unit<real>& unit, const stream_scratch<real>& scratch, real* out,
                       bool leave_out_hidden) const noexcept {
    const index_t b = u / units_, end = clip(keys_of(b), part * part_keys, (part + 1) * part_keys).end;
    const head_indices head = a_.heads[first_head(u)];
    for (index_t e = 0; e < outputs(u) * padded_dv_; ++e) scratch.turn[e] = real(0);
    for (int half = 0; half < (head.value_2 < 0 ? 1 : 2); ++half) {
      const index_t at = half * padded_row(width_);
      const auto add = [&](key_range keys, const kernel::row_run& run) {
        if (hides_ && !some_see(u, unit, 0, *unit.lines.count, keys)) return;
        const real* const weights = scratch.combined + keys.begin % turn_keys;
        if (combine(u, keys, unit, scratch.combined) && !leave_out_hidden) {
          add_rows(run, weights, outputs(u), scratch.turn + at, scratch);
          return;
        }
        for (index_t o = 0; o < outputs(u); ++o) {
          real hidden[turn_keys];
          const key_range some = clip(seen(b, o % q_len_), keys.begin, keys.end);
          if (leave_out_hidden) find_hidden(u, o, keys, hidden);
          const auto ends = [&](index_t key) { return leave_out_hidden && hidden[key - keys.begin] != real(0); };
          for (key_range stretch{some.begin, some.begin}; stretch.begin < some.end; stretch.begin = stretch.end + 1) {
            for (stretch.end = stretch.begin; stretch.end < some.end && !ends(stretch.end);) ++stretch.end;
            const index_t skipped = stretch.begin - keys.begin, count = stretch.end - stretch.begin;
            if (count > 0)
              add_rows({run.row(skipped), run.stride, count}, weights + o * turn_keys + skipped, 1,
                       scratch.turn + o * padded_dv_ + at, scratch);
          }
        }
      };
      // The sum of a turn is formed by itself: the rounding error grows with turn_keys + turns, not with the keys. Turns end at
      // multiples of turn_keys, whatever the pages are and whatever is hidden.
      for_each_run(b, part, from_.values(), half == 0 ? head.value_1 : head.value_2, scratch.gathered,
                   [&](key_range keys, const kernel::row_run& run) {
                     add(keys, run);
                     if (keys.end % turn_keys != 0 && keys.end != end) return;
                     for (index_t o = 0; o < outputs(u); ++o)
                       for (index_t c = o * padded_dv_ + at; c < o * padded_dv_ + at + padded_row(width_); ++c)
                         out[c] += scratch.turn[c], scratch.turn[c] = real(0);
                   });
    }
  }

  /// hidden[key - keys.begin]: not 0 if the rules of every map of output o hide the key.
  inline void find_hidden(index_t u, index_t o, key_range keys, real* hidden) const noexcept {
    const int only = map_of_kind_[o / q_len_ / heads(u)];
    const index_t h = first_head(u) + o / q_len_ % heads(u);
    real maps[2][turn_keys] = {};
    for (int m = 0; m < Maps; ++m)
      if (const kernel::head_rules<real> r{rules_of_map(a_, m), u / units_, h}; r.rules)
        kernel::hide_from_row(r, o % q_len_, keys, maps[m], 1);
    for (index_t j = 0; j < keys.end - keys.begin; ++j)
      hidden[j] = only != no_map ? maps[only][j] : maps[0][j] == real(0) ? real(0) : maps[Maps - 1][j];
  }

  /// out[output] += Σ weights[output] · value.
  inline void add_rows(const kernel::row_run& values, const real* weights, index_t outputs, real* out,
                       const stream_scratch<real>& scratch) const noexcept {
    kernel::with_rows(from_.values().type, values, width_, outputs, scratch.wide,
                      [&](auto type, const kernel::row_run& some, index_t first) {
                        kernel::weighted_sums<type()>(weights + first, turn_keys, outputs, some, width_, out, padded_dv_);
                      });
  }

  /// combined[output][key mod turn_keys]: the weights of both maps for keys of one part and turn. Does every row see all of
  /// them?
  inline bool combine(index_t u, key_range keys, const stream_unit<real>& unit, real* combined) const noexcept {
    const index_t b = u / units_, first_part = parts_of(b).begin, place = keys.begin / part_keys - first_part;
    const index_t origin = keys.begin / turn_keys * turn_keys;
    const auto weights = [&](index_t row) {
      return unit.weights + row * parts_ * part_keys + (origin - first_part * part_keys);
    };
    bool all_see_all = true;
    for (index_t o = 0; o < outputs(u); ++o) {
      const index_t i = o % q_len_, h = o / q_len_ % heads(u);
      const key_range some = clip(seen(b, i), keys.begin, keys.end);
      all_see_all &= some.begin == keys.begin && some.end == keys.end;
      if (some.begin >= some.end) continue;
      const int only = map_of_kind_[o / q_len_ / heads(u)];
      const index_t row_1 = unit.lines.map[only == no_map ? 0 : only][h] * q_len_ + i;
      const index_t row_2 = only == no_map ? unit.lines.map[Maps - 1][h] * q_len_ + i : row_1;
      kernel::combine_row(weights(row_1), only == no_map ? weights(row_2) : nullptr,
                          unit.mix[o].c1 * unit.shift[row_1 * parts_ + place],
                          unit.mix[o].c2 * unit.shift[row_2 * parts_ + place], some.begin - origin, some.end - origin,
                          combined + o * turn_keys);
    }
    return all_see_all;
  }

  /// Adds up the parts, applies the norm and stores.
  inline void finish(index_t u, const stream_unit<real>& unit, const stream_scratch<real>& scratch) const noexcept {
    constexpr index_t w = simd::lanes<real>;
    const index_t b = u / units_, size = outputs(u) * padded_dv_;
    for (index_t p = 1; p < parts_of(b).end - parts_of(b).begin; ++p)
      for (index_t e = 0; e < size; ++e) unit.out[e] += unit.out[p * size + e];
    const index_t per_kind = heads(u) * q_len_;
    for (index_t kind = 0; kind < kinds_; ++kind)
      for (index_t first = 0; first < per_kind; first += w) {
        const index_t count = per_kind - first < w ? per_kind - first : w;
        real scale[w] = {};
        for (index_t i = 0; i < count; ++i) {
          const index_t o = kind * per_kind + first + i;
          scale[i] = unit.mix[o].scale;
          for (index_t c = 0; c < dv_; c += width_)
            std::memcpy(scratch.finished + i * dv_ + c, unit.out + o * padded_dv_ + c / width_ * padded_row(width_),
                        static_cast<std::size_t>(width_) * sizeof(real));
        }
        kernel::normalise_rows(scratch.finished, dv_, count, dv_, scale, kind == 0 ? a_.norm : head_norm<real>::none(),
                               scratch.lanes);
        for (index_t i = 0; i < count; ++i) {
          const index_t h = first_head(u) + (first + i) / q_len_, row = (first + i) % q_len_;
          const real* const from = scratch.finished + i * dv_;
          if (kind == 0)
            kernel::write_row(from, dv_, a_.out.at(b, row, h));
          else
            kernel::write_row(from, dv_, (map_of_kind_[kind] == 0 ? a_.out1 : a_.out2).at(b, row, h));
        }
      }
  }

  static key_range clip(key_range keys, index_t begin, index_t end) noexcept {
    return {keys.begin > begin ? keys.begin : begin, keys.end < end ? keys.end : end};
  }

  inline stream_unit<real> carve_unit(arena& memory) const noexcept {
    const auto count = [](index_t n) { return static_cast<std::size_t>(n); };
    const std::size_t heads = count(most_heads_), rows = count(Maps * most_heads_ * q_len_);
    const std::size_t outputs = count(kinds_ * most_heads_ * q_len_), parts = count(parts_ > 0 ? parts_ : 1);
    stream_unit<real> u;
    u.lines.count = memory.take<index_t>(1), u.lines.lines = memory.take<stream_line>(heads, Maps);
    for (index_t*& map : u.lines.map) map = memory.take<index_t>(heads);
    u.queries = memory.take<real>(rows, count(padded_row(d_)));
    u.weights = memory.take<real>(rows, count(parts_ * part_keys));
    u.shift = memory.take<real>(rows, parts), u.sum = memory.take<real>(rows, parts);
    u.total = memory.take<kernel::row_total<real>>(rows);
    u.mix = memory.take<kernel::coefficients<real>>(outputs);
    u.out = memory.take<real>(outputs, parts * count(padded_dv_));
    return u;
  }
  inline stream_scratch<real> carve_scratch(arena& memory) const noexcept {
    const auto take = [&memory](index_t rows, index_t size) {
      return memory.take<real>(static_cast<std::size_t>(rows), static_cast<std::size_t>(size));
    };
    stream_scratch<real> s;
    s.wide = take(padded_row(d_ > width_ ? d_ : width_), kernel::unpacked_rows);
    const index_t bytes[2] = {row_bytes(from_.keys().type, d_), row_bytes(from_.values().type, width_)};
    s.gathered = memory.take<unsigned char>(static_cast<std::size_t>(bytes[0] > bytes[1] ? bytes[0] : bytes[1]),
                                            static_cast<std::size_t>(turn_keys));
    s.combined = take(kinds_ * most_heads_ * q_len_, turn_keys);
    s.turn = take(kinds_ * most_heads_ * q_len_, padded_dv_);
    s.lanes = take(dv_, simd::lanes<real>), s.finished = take(dv_, simd::lanes<real>);
    return s;
  }
  stream_unit<real> unit_at(index_t slot) const noexcept {
    arena memory(unit_memory_ + static_cast<std::size_t>(slot) * unit_bytes_);
    return carve_unit(memory);
  }
  stream_scratch<real> scratch_at(index_t worker) const noexcept {
    arena memory(worker_memory_ + static_cast<std::size_t>(worker) * worker_bytes_);
    return carve_scratch(memory);
  }

  const forward_args<T>& a_;
  source from_;
  index_t d_ = 0, width_ = 0, dv_ = 0, padded_dv_ = 0, q_len_ = 0;
  index_t kinds_ = 1;
  bool has_rules_ = false, hides_ = false;  ///< logits are changed; keys may be hidden
  int map_of_kind_[3] = {Maps == 1 ? 0 : no_map, no_map, no_map};
  index_t units_ = 0, most_heads_ = 1, parts_ = 0;
  bool split_ = false;      ///< the parts of units are dealt out, not units
  index_t unit_slots_ = 0;  ///< units in work at a time
  index_t* first_head_ = nullptr;
  unsigned char *unit_memory_ = nullptr, *worker_memory_ = nullptr;
  std::size_t unit_bytes_ = 0, worker_bytes_ = 0;
};

template <int Maps, class T>
inline std::size_t stream_bytes(const forward_args<T>& a, index_t workers) noexcept {
  arena count;
  stream_call<Maps, T>(a, workers, count);
  return count.bytes();
}

template <int Maps, class T, class Executor>
inline void run_stream(const forward_args<T>& a, workspace w, Executor& executor, index_t workers) noexcept {
  arena memory(w.data);
  stream_call<Maps, T>(a, workers, memory).run(executor);
}

}  // namespace schedule
DIFFATTN_ISA_NAMESPACE_END
