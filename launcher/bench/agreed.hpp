#pragma once

#include <string>

#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// The first reason that any rank has for passing something over; empty if none has. Collective.
[[nodiscard]] inline std::string agreed(const std::string& obstacle, Control& world) {
  return world.first_text(obstacle, "what kernels refuse");
}

}  // namespace annulus::launcher
