#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

namespace annulus::ring {

/// A sum of numbers below 2^144 in parts that are multiples of a unit of their own, 2^(24 i − 168),
/// and are added without rounding, up to 2^29 numbers. So the parts of the sum do not depend on the
/// order of the numbers, nor on how they are shared out (the idea is that of Demmel and Nguyen,
/// "Parallel reproducible summation", 2015). Entries below the least unit are rounded, each alone.
inline constexpr std::size_t kExactParts = 13;
using ExactSum = std::array<double, kExactParts>;

inline void add_exactly(double number, ExactSum& parts) {
  static constexpr auto kUnits = [] {
    std::array<double, kExactParts> units{0x1p-168};
    for (std::size_t i = 1; i < units.size(); ++i) units[i] = units[i - 1] * 0x1p24;
    return units;
  }();
  if (!(std::abs(number) < 0x1p144)) {
    parts.back() += std::isnan(number)
                        ? number
                        : std::copysign(std::numeric_limits<double>::infinity(), number);
    return;
  }
  for (std::size_t i = kExactParts - 1; i > 0; --i) {
    const double part = std::trunc(number / kUnits[i]) * kUnits[i];
    parts[i] += part;
    number -= part;
  }
  parts[0] += std::nearbyint(number / kUnits[0]) * kUnits[0];
}

}  // namespace annulus::ring
