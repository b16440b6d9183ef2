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
[[nodiscard]] ExitCode plan_command(const CommandContext& context);
[[nodiscard]] ExitCode info_command(const CommandContext& context);

}  // namespace annulus::launcher
