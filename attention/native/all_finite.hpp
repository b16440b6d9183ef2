#pragma once

#include <bit>
#include <cstdint>

namespace annulus {

// Infinities and NaNs have an exponent of all ones: adding 1 to it sets the sign bit.
inline bool all_finite(const float* values, std::int64_t count) {
  constexpr std::uint32_t kExponent = 0x7f800000;
  constexpr std::uint32_t kOne = 0x00800000;
  constexpr std::uint32_t kSign = 0x80000000;
  std::uint32_t any = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    any |= (std::bit_cast<std::uint32_t>(values[i]) & kExponent) + kOne;
  }
  return (any & kSign) == 0;
}

}  // namespace annulus
