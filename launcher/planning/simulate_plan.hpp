#pragma once

#include <iosfwd>

#include "launcher/options/options.hpp"
#include "launcher/planning/planned_case.hpp"

namespace annulus::launcher {

/// Most ranks that plan --simulate plays.
inline constexpr int kMaximumSimulatedRanks = 4096;
/// Most ranks in its trace.
inline constexpr int kMaximumTracedRanks = 64;

/// Throws ArgumentError("--simulate", …) for more than kMaximumSimulatedRanks. To be called before
/// planning, which takes long for so many.
void check_simulated_ranks(const MeshShape& mesh);

/// annulus plan --simulate: a table of ranks to `out`, and the files that the options name. For one
/// rank. Throws UserErrors.
void simulate_plan(const PlannedCase& planned, const Options& options, std::ostream& out);

}  // namespace annulus::launcher
