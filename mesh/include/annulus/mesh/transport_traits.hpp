#pragma once

#include <span>
#include <string_view>
#include <vector>

#include <annulus/mesh/peer_reach.hpp>
#include <annulus/mesh/transport.hpp>

namespace annulus {

/// The properties of a transport that matter outside it. Plain data, the same in every build, so
/// that plans and predictions need no transport.
struct TransportTraits {
  std::string_view name;                    ///< "peer"
  Transport choice = Transport::automatic;  ///< the value that selects it; automatic: none
  bool ahead = false;                       ///< messages advance while the ranks compute
  bool one_sided = false;                   ///< receivers fetch what a prepared exchange offers:
                                            ///< take() waits for receives, reclaim() for sends
  bool shares_devices = false;              ///< several ranks may use one GPU
  bool starts_once = false;         ///< messages of an exchange start together, so the start
                                    ///< is paid for once
  bool on_multiprocessors = false;  ///< kernels move the messages, at the expense of computation
  bool uniform_calls = false;    ///< all ranks of an exchange must call alike: all post it eagerly,
                                 ///< or all capture and replay it
  std::string_view inside = {};  ///< the transport that carries messages inside a node, if another

  /// The transport that carries messages inside a node.
  [[nodiscard]] constexpr std::string_view inside_node() const noexcept {
    return inside.empty() ? name : inside;
  }
};

/// All transports.
[[nodiscard]] std::span<const TransportTraits* const> transports() noexcept;
/// The transports between GPUs, in the order in which automatic prefers them.
[[nodiscard]] std::vector<Transport> device_transports();
/// The distinct transports for ranks of this extent: composite equals peer if all ranks reach each
/// other, and NCCL if none do.
[[nodiscard]] std::vector<Transport> device_transports(PeerExtent extent);
/// Throws ArgumentError for an unknown name.
[[nodiscard]] const TransportTraits& transport_traits(std::string_view name);
/// Throws InternalError for automatic.
[[nodiscard]] const TransportTraits& transport_traits(Transport transport);

}  // namespace annulus
