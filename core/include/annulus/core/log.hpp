#pragma once

#include <memory>

namespace spdlog {
class logger;
}

namespace annulus {

/// The project's logger, on standard error. Silent unless ANNULUS_LOG_LEVEL names a level.
[[nodiscard]] spdlog::logger& log();

/// Prefixes every line with the rank from now on.
void set_log_rank(int rank);

}  // namespace annulus
