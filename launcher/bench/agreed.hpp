#pragma once

#include <string>
#include <utility>

#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// The first reason that any rank has for passing something over; empty if none has. Collective.
[[nodiscard]] inline std::string agreed(const std::string& obstacle, Control& world) {
  for (std::string& reason : world.gather_text(obstacle, "what kernels refuse")) {
    if (!reason.empty()) return std::move(reason);
  }
  return {};
}

}  // namespace annulus::launcher
