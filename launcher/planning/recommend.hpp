#pragma once

#include <iosfwd>

#include <annulus/attention/registry.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// annulus plan --recommend: meshes dp × tp × sp of --ranks ranks on --nodes nodes, with every
/// sequence layout and schedule, in order of predicted time; those that cannot run or need more
/// than --memory with the reason. A table to `out`, and the files that the options name. For one
/// rank. Throws UserErrors.
void recommend(const Options& options, const Registry& registry, std::ostream& out);

}  // namespace annulus::launcher
