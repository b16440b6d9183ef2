#pragma once

#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

namespace annulus {

/// Short messages in host memory through a key-value store, for the set-up of other transports.
inline constexpr TransportTraits kStoreTraits{.name = "store"};

}  // namespace annulus
