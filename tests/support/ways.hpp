// SPDX-License-Identifier: MIT
#pragma once

// All ways to make one call: by both schedules, on tensors and from every kind of cache.

#include <algorithm>
#include <diffattn/arguments.hpp>
#include <string>
#include <vector>

#include "cache.hpp"

namespace test {

using diffattn::schedule_choice;

inline constexpr schedule_choice both_schedules[] = {schedule_choice::panels, schedule_choice::stream};

inline const char* name(schedule_choice s) {
  return s == schedule_choice::panels ? "panels" : s == schedule_choice::stream ? "stream" : "automatic";
}

/// f(arguments) for a call on tensors by both schedules, and from caches of its element type that hold them. The tokens are
/// appended in turns; a ring has no more room than the call needs.
template <class T, class F>
void for_each_way(diffattn::forward_args<T> args, F&& f) {
  for (const schedule_choice schedule : both_schedules) {
    SCOPED_TRACE(std::string(name(schedule)) + ", tensors");
    args.schedule = schedule;
    f(args);
  }
  index_t first_seen = args.k.tokens;
  for (index_t b = 0; b < args.q.batch; ++b)
    first_seen = std::min(first_seen, visible_keys(args.mask, args.q.tokens, args.k.tokens, b, 0).begin);
  std::vector<index_t> sequences(static_cast<std::size_t>(args.q.batch));
  for (std::size_t b = 0; b < sequences.size(); ++b) sequences[b] = static_cast<index_t>(sequences.size() - b);
  for (const cache_choice& choice : all_caches) {
    diffattn::kv_cache_config config;
    config.heads = args.heads, config.key_width = args.k.width, config.value_width = args.v.width;
    config.keys = config.values = diffattn::storage_of<T>;
    config.kind = choice.kind, config.page_tokens = choice.page_tokens, config.sequences = args.q.batch + 1;
    config.capacity = std::max(args.k.tokens - (choice.kind == kv_cache_kind::ring ? first_seen : 0), index_t{1});
    owned_cache cache(config);
    cache.append_in_turns(sequences, args.k, args.v);
    diffattn::forward_args<T> cached = args;
    cached.k = cached.v = {}, cached.cache = cache->view(), cached.sequences = sequences.data();
    for (const schedule_choice schedule : both_schedules) {
      SCOPED_TRACE(std::string(name(schedule)) + ", " + choice.text());
      cached.schedule = schedule;
      f(cached);
    }
  }
}

}  // namespace test
