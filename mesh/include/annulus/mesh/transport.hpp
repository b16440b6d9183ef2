#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace annulus {

/// What carries data between the GPUs of a group. Host memory always goes by MPI.
enum class Transport : std::uint8_t {
  automatic,  ///< the first of device_transports() that nothing stands in the way of
  nccl,
  peer  ///< copy engines over mapped memory, inside a node
};

/// What others must know of a transport. Plain data, the same in every build: for groups, and for
/// those who only plan and predict.
struct TransportTraits {
  std::string_view name;                    ///< "peer"
  Transport choice = Transport::automatic;  ///< the user's word for it; automatic: none
  bool ahead = false;                       ///< messages move while the ranks compute
  bool one_sided = false;       ///< a receiver takes by itself what a prepared exchange offers:
                                ///< take() waits for no send, reclaim() for nothing else
  bool shares_devices = false;  ///< several ranks may use one GPU
  bool uniform_calls = false;   ///< an exchange is posted eagerly by all its ranks, or captured and
                                ///< replayed by all of them
};

/// Every transport there is.
[[nodiscard]] std::span<const TransportTraits* const> transports() noexcept;
/// Those between GPUs, the ones that automatic prefers first.
[[nodiscard]] std::vector<Transport> device_transports();
/// Throws ArgumentError for a name that no transport has.
[[nodiscard]] const TransportTraits& transport_traits(std::string_view name);
/// Not of automatic: InternalError.
[[nodiscard]] const TransportTraits& transport_traits(Transport transport);

/// "auto", "nccl", "peer".
[[nodiscard]] std::string_view name_of(Transport transport) noexcept;
/// All that parse_transport() takes, automatic first.
[[nodiscard]] std::vector<std::string_view> transport_choices();
/// Throws ArgumentError.
[[nodiscard]] Transport parse_transport(std::string_view name);

}  // namespace annulus
