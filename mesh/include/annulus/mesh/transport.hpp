#pragma once

#include <cstdint>
#include <string_view>

namespace annulus {

/// What carries data between the GPUs of a group. Host memory always goes by MPI.
enum class Transport : std::uint8_t {
  automatic,  ///< copy engines where all ranks of the group can map each other's memory, else NCCL
  nccl,
  peer  ///< copy engines over mapped memory, inside a node
};

/// "auto", "nccl", "peer".
[[nodiscard]] std::string_view name_of(Transport transport) noexcept;
/// Throws ArgumentError.
[[nodiscard]] Transport parse_transport(std::string_view name);

}  // namespace annulus
