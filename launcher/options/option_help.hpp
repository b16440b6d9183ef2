#pragma once

#include <string>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The text of annulus --help.
[[nodiscard]] std::string program_help();
/// The text of annulus COMMAND --help: the options of that command, with units and defaults.
[[nodiscard]] std::string command_help(Command command);

}  // namespace annulus::launcher
