// SPDX-License-Identifier: MIT
// operator new for test programs: every block lies in pages of its own, with pages before and behind that trap.
//
//   DIFFATTN_GUARD=begin   the block starts right behind a trapping page
//   DIFFATTN_GUARD=end     the block ends right before one
//   otherwise              malloc
//
// Addresses are never used again, so use after delete traps too. Fresh memory is all ones: NaN in every floating type.
//
// Blocks are aligned for whatever may lie in them and no further, or else the end of a vector would not be the end of its page:
// the size of a type is a multiple of its alignment, so n bytes need no more than the largest power of two that divides n, up
// to that of operator new. Only an over-aligned new (std::align_val_t) may leave bytes between a block and the page behind it.
//
// What goes through malloc is not guarded: the memory of Eigen's own matrices and tensors, which must be aligned beyond their
// ends. The library itself allocates nothing.

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

constexpr std::size_t page = 4096, arena_pages = std::size_t{1} << 30;  // 4 TiB of addresses
// A block of its own costs two mappings, of which Linux allows 65530. Beyond, blocks come from malloc; the program says so.
constexpr long most_blocks = 30'000;

std::atomic<long> blocks{0}, unguarded{0};
std::atomic<std::size_t> used_pages{1};  // the first page traps

struct report {
  ~report() {
    if (unguarded > 0) std::fprintf(stderr, "guard: %ld blocks had no guard pages\n", unguarded.load());
  }
} at_exit;

void* reserve(std::size_t bytes, int protection) {
  void* const at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

enum class mode { off, begin, end };

/// Constructed by the first call of new, which may come before any static object is.
struct arena {
  mode side = mode::off;
  unsigned char* memory = nullptr;
  std::uint32_t* sizes = nullptr;  // pages of the block whose first page this is

  arena() {
    const char* const value = std::getenv("DIFFATTN_GUARD");
    if (!value) return;
    side = std::strcmp(value, "begin") == 0 ? mode::begin : std::strcmp(value, "end") == 0 ? mode::end : mode::off;
    if (side == mode::off) return;
    memory = static_cast<unsigned char*>(reserve(arena_pages * page, PROT_NONE));
    sizes = static_cast<std::uint32_t*>(reserve(arena_pages * sizeof(std::uint32_t), PROT_READ | PROT_WRITE));
    if (!memory || !sizes) std::fputs("guard: no room for the arena\n", stderr), std::abort();
  }
  bool holds(const unsigned char* p) const { return memory && p >= memory && p < memory + arena_pages * page; }
};

const arena& the_arena() {
  static const arena a;
  return a;
}

/// Null if there is no room.
void* guarded(const arena& a, std::size_t n, std::size_t alignment) {
  if (alignment > page || n > arena_pages / 2 * page) return nullptr;
  const std::size_t padded = (n + alignment - 1) / alignment * alignment;
  const std::size_t pages = padded == 0 ? 1 : (padded + page - 1) / page;
  if (++blocks > most_blocks) return --blocks, nullptr;
  const std::size_t first = used_pages.fetch_add(pages + 1);  // and the trapping page behind it
  if (first + pages >= arena_pages) return --blocks, nullptr;
  unsigned char* const start = a.memory + first * page;
  a.sizes[first] = static_cast<std::uint32_t>(pages);
  if (n == 0) return start;  // not to be touched at all
  if (mprotect(start, pages * page, PROT_READ | PROT_WRITE) != 0) return --blocks, nullptr;
  unsigned char* const block = a.side == mode::begin ? start : start + pages * page - padded;
  std::memset(block, 0xff, n);
  return block;
}

void* allocate(std::size_t n, std::size_t alignment) {
  const arena& a = the_arena();
  if (a.side != mode::off) {
    if (void* const block = guarded(a, n, alignment)) return block;
    ++unguarded;
  }
  constexpr std::size_t least = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
  const std::size_t bytes = n == 0 ? 1 : n, rounded = (bytes + alignment - 1) / alignment * alignment;
  void* const block = alignment <= least ? std::malloc(bytes) : rounded < n ? nullptr : std::aligned_alloc(alignment, rounded);
  if (!block) throw std::bad_alloc();
  return block;
}

void release(void* p) noexcept {
  unsigned char* const block = static_cast<unsigned char*>(p);
  const arena& a = the_arena();
  if (!a.holds(block)) return std::free(p);
  const std::size_t first = static_cast<std::size_t>(block - a.memory) / page;  // no block has a whole page before it
  if (a.sizes[first] == 0) std::fputs("guard: deleted twice, or never allocated\n", stderr), std::abort();
  const std::size_t bytes = a.sizes[first] * page;
  a.sizes[first] = 0;
  // New pages in place of the old ones give the memory back and join the trapping neighbours in one mapping.
  mmap(a.memory + first * page, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  --blocks;
}

}  // namespace

// All other forms (arrays, nothrow, sized) call one of these: that is their default behaviour in the standard.
void* operator new(std::size_t n) {
  constexpr std::size_t most = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
  const std::size_t divisor = n & (~n + 1);
  return allocate(n, n == 0 || divisor > most ? most : divisor);
}
void* operator new(std::size_t n, std::align_val_t alignment) {
  return allocate(n, static_cast<std::size_t>(alignment));
}
void operator delete(void* p) noexcept {
  release(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  release(p);
}
// Compilers call these directly and warn if they are left out.
void operator delete(void* p, std::size_t) noexcept {
  release(p);
}
void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  release(p);
}
