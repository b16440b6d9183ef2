#pragma once

#include <cstdint>
#include <string>

namespace annulus {

/// "512 B", "1.5 MiB", "12.4 GiB".
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

}  // namespace annulus
