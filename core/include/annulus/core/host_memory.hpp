#pragma once

#include <string>

namespace annulus {

/// "1.2 GiB of the host's 15.6 GiB are available", followed by the limit of this process's address
/// space if it has one; empty where the system does not say, or there is no memory for the text.
[[nodiscard]] std::string host_memory_state() noexcept;

}  // namespace annulus
