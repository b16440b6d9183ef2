#pragma once

#include <array>
#include <cstdint>

namespace annulus {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

/// A seed as a key.
[[nodiscard]] constexpr PhiloxKey philox_key(std::uint64_t seed) {
  return {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)};
}

/// Philox 4x32-10 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": four random
/// words as a pure function of a counter and a key, so that any rank can compute any of them.
[[nodiscard]] constexpr PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t even = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t odd = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(odd >> 32U) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(odd),
               static_cast<std::uint32_t>(even >> 32U) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(even)};
    key[0] += 0x9E3779B9;  // the golden ratio …
    key[1] += 0xBB67AE85;  // … and √3 − 1
  }
  return counter;
}

}  // namespace annulus
