#pragma once

#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

namespace annulus {

/// The receiver's copy engines pull from the sender's memory, mapped by CUDA IPC. Copies of one
/// exchange follow each other almost without a pause.
inline constexpr TransportTraits kPeerTraits{.name = "peer",
                                             .choice = Transport::peer,
                                             .ahead = true,
                                             .one_sided = true,
                                             .shares_devices = true,
                                             .starts_once = true};

}  // namespace annulus
