#pragma once

#include <set>
#include <string_view>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// Throws UserError for an option of the command line that has no effect beside the others. The
/// message names the option, the cause, and what would give it an effect. `given` holds the names
/// of the options on the command line, without dashes. Those of environment and files are not
/// checked, as they may be meant for other commands.
void check_effects(const Options& options, const std::set<std::string_view>& given);

}  // namespace annulus::launcher
