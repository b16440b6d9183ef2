#pragma once

#include <string>

namespace annulus {

/// Equal for processes on one node, containers on it included. ANNULUS_NODE splits a machine into
/// nodes. Throws ArgumentError for a bad name in it, as does node_name().
[[nodiscard]] std::string node_identity();
/// The same, whatever ANNULUS_NODE says: for what the processes of a machine really share.
[[nodiscard]] std::string machine_identity();
/// ANNULUS_NODE, or else the host name.
[[nodiscard]] std::string node_name();
[[nodiscard]] std::string host_name();

}  // namespace annulus
