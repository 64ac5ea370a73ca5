// SPDX-License-Identifier: MIT
#pragma once

// Scratch memory belongs to the caller. `arena` hands out pieces of it, or, given no memory, only counts: the same code
// sizes a workspace and carves it, so the two cannot disagree.

#include <cstddef>
#include <cstdint>
#include <new>

#include "config.hpp"

DIFFATTN_NAMESPACE_BEGIN

/// Scratch memory of a call: at least `workspace_bytes` bytes, of any alignment, not shared by two calls at a time.
struct workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Scratch memory from the heap, for who does not mind. Throws std::bad_alloc.
class owned_workspace {
 public:
  DIFFATTN_INLINE explicit owned_workspace(std::size_t bytes) : memory_{::operator new(bytes), bytes} {}
  DIFFATTN_INLINE ~owned_workspace() { ::operator delete(memory_.data); }
  owned_workspace(const owned_workspace&) = delete;
  owned_workspace& operator=(const owned_workspace&) = delete;
  DIFFATTN_INLINE workspace view() const noexcept { return memory_; }

 private:
  workspace memory_;
};

/// Every piece starts on a cache line. One line is reserved to align whatever the caller passes.
class arena {
 public:
  static constexpr std::size_t alignment = 64;
  /// Sizes saturate here, so that a size that overflows is seen to be too large instead of wrapping round.
  static constexpr std::size_t limit = std::size_t{1} << 62;

  /// Counts only.
  DIFFATTN_INLINE arena() noexcept = default;
  DIFFATTN_INLINE explicit arena(void* data) noexcept : base_(static_cast<unsigned char*>(data)) {
    base_ += (alignment - reinterpret_cast<std::uintptr_t>(base_) % alignment) % alignment;
  }

  /// Room for `count` times `size` elements; null when counting.
  template <class T>
  DIFFATTN_INLINE T* take(std::size_t size, std::size_t count = 1) noexcept {
    T* const piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    if (used_ >= limit || (count > 0 && size > limit / sizeof(T) / count))
      used_ = limit;
    else
      used_ += (size * count * sizeof(T) + alignment - 1) / alignment * alignment;
    return piece;
  }

  /// Bytes that a workspace needs for all that was taken.
  DIFFATTN_INLINE std::size_t bytes() const noexcept { return used_ == 0 ? 0 : used_ + alignment; }

 private:
  unsigned char* base_ = nullptr;
  std::size_t used_ = 0;
};

DIFFATTN_NAMESPACE_END
