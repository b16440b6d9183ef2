#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include <annulus/ring/plan.hpp>

namespace annulus::ring {

[[nodiscard]] inline std::string_view name_of(BufferKind kind) noexcept {
  constexpr std::array<std::string_view, 3> kNames{"caller", "exchange", "local"};
  return kNames[static_cast<std::size_t>(kind)];
}

}  // namespace annulus::ring
