// SPDX-License-Identifier: MIT
// All that objects of a program may call, for symbols.cmake.

#include <diffattn/attention.hpp>
#include <diffattn/forward.hpp>
#include <diffattn/kv_cache.hpp>
#include <diffattn/merge.hpp>

#define SYMBOLS_JOIN_(a, b) a##b
#define SYMBOLS_JOIN(a, b) SYMBOLS_JOIN_(a, b)

namespace {

template <class T>
int use(diffattn::forward_args<T> f, diffattn::attention_args<T> a, diffattn::merge_args<T> m, diffattn::workspace w,
        diffattn::kv_cache cache) {
  int sum = static_cast<int>(diffattn::forward(f, w)) + static_cast<int>(diffattn::attention(a, w)) +
            static_cast<int>(diffattn::merge(m, w)) + static_cast<int>(cache.append(f.k, f.v)) +
            static_cast<int>(cache.truncate(0, 1)) + static_cast<int>(cache.discard(0, 1)) + static_cast<int>(cache.fork(0, 1));
  sum += static_cast<int>(diffattn::workspace_bytes(f) + diffattn::workspace_bytes(a) + diffattn::workspace_bytes(m));
  return sum + static_cast<int>(*message(diffattn::check(f)));
}

}  // namespace

#define SYMBOLS_USE(T)                                                                                                        \
  int SYMBOLS_JOIN(use_##T##_, DIFFATTN_ISA)(const diffattn::forward_args<T>& f, const diffattn::attention_args<T>& a,        \
                                             const diffattn::merge_args<T>& m, diffattn::workspace w, diffattn::kv_cache c) { \
    return use<T>(f, a, m, w, c);                                                                                             \
  }
using diffattn::bf16;
SYMBOLS_USE(float)
SYMBOLS_USE(bf16)
