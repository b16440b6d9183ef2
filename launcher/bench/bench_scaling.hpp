#pragma once

#include <annulus/core/error.hpp>

#include "launcher/options/command_context.hpp"

namespace annulus::launcher {

/// annulus bench --scaling: times the problem on the first 1, 2, 4, … and on all ranks of the job,
/// strong and weak. The other ranks wait. Collective.
[[nodiscard]] ExitCode bench_scaling(const CommandContext& context);

}  // namespace annulus::launcher
