#pragma once

#include <iosfwd>

#include "launcher/options/options.hpp"
#include "launcher/planning/planned_case.hpp"

namespace annulus::launcher {

/// The most ranks that plan --simulate takes.
inline constexpr int kMaximumSimulatedRanks = 4096;
/// The most ranks in its trace.
inline constexpr int kMaximumTracedRanks = 64;

/// Throws ArgumentError("--simulate", …) for more than kMaximumSimulatedRanks. To be called before
/// planning, which takes long for many ranks.
void check_simulated_ranks(const MeshShape& mesh);

/// annulus plan --simulate: writes a table of ranks to `out`, and the files that the options name.
/// Not collective. Throws UserErrors.
void simulate_plan(const PlannedCase& planned, const Options& options, std::ostream& out);

}  // namespace annulus::launcher
