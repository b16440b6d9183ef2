#pragma once

#include <iosfwd>
#include <string_view>

#include <annulus/core/error.hpp>
#include <annulus/mesh/mpi.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The session and options that every command gets.
struct CommandContext {
  const MpiSession& session;
  const Options& options;
  /// The stream for tables and texts; standard output except in tests. Only mesh rank 0 writes to
  /// it.
  std::ostream& out;
  std::string_view commit = "unknown";  ///< of the program's sources
};

/// The commands of the program. Collective over the session's ranks: all return the same code or
/// throw the same UserError. One rank alone may throw a LibraryError, after which only abort_job()
/// is possible. Commands write only warnings to standard error.
[[nodiscard]] ExitCode run_command(const CommandContext& context);
[[nodiscard]] ExitCode verify_command(const CommandContext& context);
[[nodiscard]] ExitCode bench_command(const CommandContext& context);
[[nodiscard]] ExitCode plan_command(const CommandContext& context);
[[nodiscard]] ExitCode info_command(const CommandContext& context);

}  // namespace annulus::launcher
