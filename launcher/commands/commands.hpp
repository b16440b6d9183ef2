#pragma once

#include <annulus/core/error.hpp>

#include "launcher/options/command_context.hpp"

namespace annulus::launcher {

/// The commands of the program. Collective over the session's ranks: all return the same code or
/// throw the same UserError. One rank alone may throw a LibraryError, after which only abort_job()
/// is possible. Commands write only warnings to standard error.
[[nodiscard]] ExitCode run_command(const CommandContext& context);
[[nodiscard]] ExitCode verify_command(const CommandContext& context);
[[nodiscard]] ExitCode bench_command(const CommandContext& context);
/// annulus bench --hops.
[[nodiscard]] ExitCode bench_hops(const CommandContext& context);
/// annulus bench --scaling: measures strong and weak scaling on the first 1, 2, 4, … ranks of the
/// job and on all of them. The other ranks wait.
[[nodiscard]] ExitCode bench_scaling(const CommandContext& context);
/// annulus bench --calibrate: measures a cost model on the ranks of this job and writes it for
/// --cost-model, complete or not at all. It measures merges, reads and hops by each transport, and
/// calls and rates by rows for each implementation that computes the problem. An existing file of
/// the same machine keeps its classes of other problems; a file of another machine is an error.
[[nodiscard]] ExitCode calibrate(const CommandContext& context);
[[nodiscard]] ExitCode plan_command(const CommandContext& context);
[[nodiscard]] ExitCode info_command(const CommandContext& context);

}  // namespace annulus::launcher
