#pragma once

#include <annulus/core/error.hpp>

#include "launcher/commands/commands.hpp"

namespace annulus::launcher {

/// annulus bench --calibrate: measures what the cost model needs on the ranks of this job (kernel
/// by rows, kernel call, merge, hops by each transport) and writes it for --cost-model, complete or
/// not at all. Collective.
[[nodiscard]] ExitCode calibrate(const CommandContext& context);

}  // namespace annulus::launcher
