// SPDX-License-Identifier: MIT
#pragma once

// The preset `guard` puts every block of memory between pages that trap (tests/guard). Margins of our own would only hide what
// is read or written beyond a block.

#include <cstddef>

namespace test {

#if defined(DIFFATTN_GUARD)
inline constexpr bool guarded = true;
#else
inline constexpr bool guarded = false;
#endif

/// The line that the library reserves to align memory of any alignment. Guarded blocks lie on a line and do without it, so that
/// the last byte that is used is the last one there is.
inline constexpr std::size_t spare_line = guarded ? 64 : 0;

}  // namespace test
