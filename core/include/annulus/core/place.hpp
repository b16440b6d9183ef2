#pragma once

#include <cstdint>
#include <string>

namespace annulus {

/// Where memory lives and work runs.
struct Place {
  enum class Kind : std::uint8_t { host, cuda };
  Kind kind = Kind::host;
  int device = 0;

  static constexpr Place host() { return {}; }
  static constexpr Place cuda(int device) { return {Kind::cuda, device}; }
  [[nodiscard]] constexpr bool is_host() const { return kind == Kind::host; }
  bool operator==(const Place&) const = default;
};

/// "cpu", "cuda:1".
[[nodiscard]] inline std::string to_string(Place place) {
  return place.is_host() ? "cpu" : "cuda:" + std::to_string(place.device);
}

}  // namespace annulus
