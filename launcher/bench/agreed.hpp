#pragma once

#include <string>

#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// The first rank's reason to pass something over; empty if no rank has one. Collective.
[[nodiscard]] inline std::string agreed(const std::string& obstacle, Control& world) {
  return world.first_text(obstacle, "what kernels refuse");
}

}  // namespace annulus::launcher
