// SPDX-License-Identifier: MIT
#pragma once

// Counts allocations: replaces malloc and its relatives in the whole program, so one of its files includes this.

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define DIFFATTN_TEST_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DIFFATTN_TEST_SANITIZED 1
#endif

// Sanitizers bring their own malloc, and only glibc has a second name for the real one.
#if defined(__GLIBC__) && !defined(DIFFATTN_TEST_SANITIZED)
#define DIFFATTN_TEST_TRAPS_MALLOC 1

namespace test {

inline std::atomic<bool> armed{false};
inline std::atomic<int> allocations{0};
inline void count_allocation() {
  if (armed.load(std::memory_order_relaxed)) ++allocations;
}

}  // namespace test

extern "C" {
void* __libc_malloc(std::size_t size);                           // NOLINT
void* __libc_calloc(std::size_t n, std::size_t size);            // NOLINT
void* __libc_realloc(void* p, std::size_t size);                 // NOLINT
void* __libc_memalign(std::size_t alignment, std::size_t size);  // NOLINT

void* malloc(std::size_t size) noexcept {
  return test::count_allocation(), __libc_malloc(size);
}
void* calloc(std::size_t n, std::size_t size) noexcept {
  return test::count_allocation(), __libc_calloc(n, size);
}
void* realloc(void* p, std::size_t size) noexcept {
  return test::count_allocation(), __libc_realloc(p, size);
}
void* memalign(std::size_t alignment, std::size_t size) noexcept {
  return test::count_allocation(), __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  return test::count_allocation(), __libc_memalign(alignment, size);
}
int posix_memalign(void** p, std::size_t alignment, std::size_t size) noexcept {
  test::count_allocation();
  *p = __libc_memalign(alignment, size);
  return *p ? 0 : ENOMEM;
}
}
#endif
