#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include <fmt/format.h>

/// The library's log on standard error. Silent unless ANNULUS_LOG_LEVEL names a level.
namespace annulus {

/// info: the main steps of a run, only from the first rank of a mesh if all would log the same.
/// debug: every choice, on every rank.
enum class LogLevel : std::uint8_t { debug, info };

[[nodiscard]] bool logs(LogLevel level);
void write_log(LogLevel level, std::string_view text);

/// Formats nothing when the level is off.
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  if (logs(LogLevel::info)) {
    write_log(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
  }
}
template <class... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  if (logs(LogLevel::debug)) {
    write_log(LogLevel::debug, fmt::format(format, std::forward<Args>(args)...));
  }
}

/// Prefixes every line with the rank from now on.
void set_log_rank(int rank);

}  // namespace annulus
