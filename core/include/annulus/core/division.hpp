#pragma once

#include <cstdint>

namespace annulus {

// Quotients for b > 0; a may be negative.

constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) {
  return a / b + (a % b > 0 ? 1 : 0);
}

constexpr std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  return a / b - (a % b < 0 ? 1 : 0);
}

/// The next multiple of `unit` at or above `count`.
constexpr std::int64_t round_up(std::int64_t count, std::int64_t unit) {
  return ceil_divide(count, unit) * unit;
}

}  // namespace annulus
