#pragma once

#include <string>

#include <annulus/mesh/transport.hpp>

/// Readers of option values that the library has names for. Each throws ArgumentError(option, text,
/// the names), with the nearest of them, or UserError.
namespace annulus::launcher {

/// A PartitionSpec that can be parsed, as its text.
[[nodiscard]] std::string parse_spec(const std::string& option, const std::string& text);
/// A name, or "auto".
[[nodiscard]] std::string parse_schedule_name(const std::string& option, const std::string& text);
[[nodiscard]] std::string parse_implementation_name(const std::string& option,
                                                    const std::string& text);
[[nodiscard]] std::string parse_mode_name(const std::string& option, const std::string& text);
[[nodiscard]] Transport parse_transport_name(const std::string& option, const std::string& text);

}  // namespace annulus::launcher
