#pragma once

#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

#include "peer/traits.hpp"

namespace annulus {

/// Copy engines inside a node, NCCL between nodes. An exchange ends when both parts have sent and
/// received.
inline constexpr TransportTraits kCompositeTraits{.name = "composite",
                                                  .choice = Transport::composite,
                                                  .ahead = true,
                                                  .starts_once = true,
                                                  .on_multiprocessors = true,
                                                  .uniform_calls = true,
                                                  .inside = kPeerTraits.name};

}  // namespace annulus
