#pragma once

#include <set>
#include <string_view>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// Refuses options of the command line that the others leave without an effect: throws UserError
/// with both and what would give the first one an effect. `given` holds their names, without
/// dashes. Environment and files are not asked: they hold settings for several commands.
void check_effects(const Options& options, const std::set<std::string_view>& given);

}  // namespace annulus::launcher
