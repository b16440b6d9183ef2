#pragma once

#include <annulus/core/error.hpp>

#include "launcher/options/command_context.hpp"

namespace annulus::launcher {

/// annulus bench --calibrate: measures a cost model on the ranks of this job and writes it for
/// --cost-model, complete or not at all: merges, reads, hops by each transport, and calls and rates
/// by rows for each implementation that computes the problem. An existing file of the same machine
/// keeps its classes of other problems; one of another machine is an error. Collective.
[[nodiscard]] ExitCode calibrate(const CommandContext& context);

}  // namespace annulus::launcher
