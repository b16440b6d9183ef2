#pragma once

#include <string>

namespace annulus {

/// Equal for processes on one node, containers on it included.
[[nodiscard]] std::string node_identity();
[[nodiscard]] std::string host_name();

}  // namespace annulus
