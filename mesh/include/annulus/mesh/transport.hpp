#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace annulus {

/// The carrier of data between the GPUs of a group. MPI always carries data in host memory.
enum class Transport : std::uint8_t {
  automatic,  ///< the first of Mesh::transports()
  nccl,
  peer,      ///< copy engines over mapped memory, inside a node
  composite  ///< per message: peer between ranks that reach each other, else nccl
};

/// "auto", "composite", "nccl", "peer".
[[nodiscard]] std::string_view name_of(Transport transport) noexcept;
/// All names that parse_transport() accepts, "auto" first.
[[nodiscard]] std::vector<std::string_view> transport_choices();
/// Throws ArgumentError.
[[nodiscard]] Transport parse_transport(std::string_view name);

}  // namespace annulus
