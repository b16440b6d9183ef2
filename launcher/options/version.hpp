#pragma once

#include <string_view>

namespace annulus::launcher {

inline constexpr std::string_view kVersion = ANNULUS_VERSION;
inline constexpr std::string_view kBuildType = ANNULUS_BUILD_TYPE;
inline constexpr std::string_view kHighwayVersion = ANNULUS_HIGHWAY_VERSION;

}  // namespace annulus::launcher
