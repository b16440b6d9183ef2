#pragma once

#include <iosfwd>
#include <string_view>

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

}  // namespace annulus::launcher
