#pragma once

#include <annulus/mesh/transport.hpp>

namespace annulus {

/// Copies of a rank that is alone.
inline constexpr TransportTraits kSelfTraits{.name = "self"};

}  // namespace annulus
