#pragma once

#include <string>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// What annulus --help prints.
[[nodiscard]] std::string program_help();
/// What annulus COMMAND --help prints: the options of that command, with units and defaults.
[[nodiscard]] std::string command_help(Command command);

}  // namespace annulus::launcher
