#pragma once

#include <memory>
#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>

#include "peer/flags.hpp"
#include "peer/peer_exchange.hpp"
#include "peer/shared_memory.hpp"

namespace annulus::peer {

/// Prepares an exchange between the ranks of `host`: the two ranks of a pair exchange the addresses
/// of data and flags, in memory that counts as shared from then on. Collective over the ranks that
/// the messages name. An error on one rank is passed to its peers, which throw LibraryError too.
[[nodiscard]] std::unique_ptr<PeerExchange> shake_hands(Group& host, const Watchdog& watchdog,
                                                        const std::vector<Send>& sends,
                                                        const std::vector<Receive>& receives,
                                                        const ExchangeLabel& label,
                                                        FlagBlock& flags, SharedMemoryPool& memory,
                                                        PeerMappings& mappings);

}  // namespace annulus::peer
