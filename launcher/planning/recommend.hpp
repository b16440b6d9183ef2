#pragma once

#include <iosfwd>

#include <annulus/attention/registry.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// annulus plan --recommend: compares meshes dp × tp × sp of --ranks ranks, or one --mesh, with
/// every sequence layout and schedule, by predicted time and --memory, and says what to run. Needs
/// --shape and the results of with_ranks(). Writes a table to `out`, and the files that the options
/// name. Not collective. Throws UserErrors.
void recommend(const Options& options, const Registry& registry, std::ostream& out);

}  // namespace annulus::launcher
