#pragma once

#include <string>

namespace annulus {

/// Equal for processes on one node, including its containers. ANNULUS_NODE splits a machine into
/// nodes; a bad name in it is an ArgumentError, here and in node_name().
[[nodiscard]] std::string node_identity();
/// The same without ANNULUS_NODE, for what the processes of a machine really share.
[[nodiscard]] std::string machine_identity();
/// ANNULUS_NODE, else the host name.
[[nodiscard]] std::string node_name();
[[nodiscard]] std::string host_name();

}  // namespace annulus
