#pragma once

#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

namespace annulus {

/// Copies within a single rank.
inline constexpr TransportTraits kSelfTraits{.name = "self"};

}  // namespace annulus
