// SPDX-License-Identifier: MIT
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace test {

/// Names of the axes and their sizes, outermost first, to print where an element is.
struct axes {
  std::vector<std::pair<const char*, long>> sizes;

  std::string operator()(std::size_t index) const {
    std::string text;
    long rest = static_cast<long>(index);
    for (std::size_t a = sizes.size(); a-- > 0; rest /= sizes[a].second)
      text = std::string(sizes[a].first) + " " + std::to_string(rest % sizes[a].second) + (text.empty() ? "" : ", ") + text;
    return sizes.empty() ? "element " + std::to_string(index) : text;
  }
};

/// Is every |actual - expected| <= tolerance? NaN only matches NaN, an infinity only itself, and a tolerance that is not finite
/// matches nothing: a comparison must not pass because its yardstick is broken. On failure the element furthest outside is
/// shown.
template <class T>
testing::AssertionResult compare(const std::vector<T>& actual, const std::vector<double>& expected,
                                 const std::vector<double>& tolerance, const axes& where = {}) {
  if (actual.size() != expected.size() || tolerance.size() != expected.size())
    return testing::AssertionFailure() << "sizes differ: " << actual.size() << ", " << expected.size() << ", "
                                       << tolerance.size();
  std::size_t outside = 0, worst = 0;
  double worst_excess = -1;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = static_cast<double>(actual[i]), e = expected[i];
    double excess = 0;  // error in tolerances
    if (std::isnan(a) || std::isnan(e) || std::isinf(a) || std::isinf(e))
      excess = (std::isnan(a) && std::isnan(e)) || a == e ? 0 : std::numeric_limits<double>::infinity();
    else if (!std::isfinite(tolerance[i]))
      excess = std::numeric_limits<double>::infinity();
    else if (std::fabs(a - e) > tolerance[i])
      excess = std::fabs(a - e) / std::max(tolerance[i], std::numeric_limits<double>::min());
    if (excess == 0) continue;
    ++outside;
    if (excess > worst_excess) worst_excess = excess, worst = i;
  }
  if (outside == 0) return testing::AssertionSuccess();
  std::ostringstream text;
  text.precision(9);
  text << outside << " of " << actual.size() << " elements outside; worst at " << where(worst) << ": actual "
       << static_cast<double>(actual[worst]) << ", expected " << expected[worst] << ", error "
       << static_cast<double>(actual[worst]) - expected[worst] << ", tolerance " << tolerance[worst];
  return testing::AssertionFailure() << text.str();
}

/// Are two results the same, bit for bit? (NaN equals NaN of any payload: which one survives an addition is up to the
/// processor.)
template <class T>
testing::AssertionResult identical(const std::vector<T>& actual, const std::vector<T>& expected, const axes& where = {}) {
  if (actual.size() != expected.size()) return testing::AssertionFailure() << "sizes differ";
  std::size_t different = 0, first = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0) continue;
    if (different++ == 0) first = i;
  }
  if (different == 0) return testing::AssertionSuccess();
  std::ostringstream text;
  text.precision(std::numeric_limits<T>::max_digits10);
  text << different << " of " << actual.size() << " elements differ; first at " << where(first) << ": " << actual[first]
       << " and " << expected[first];
  return testing::AssertionFailure() << text.str();
}

}  // namespace test
