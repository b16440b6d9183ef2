#pragma once

#include <vector>

#include <annulus/mesh/transport.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/tuning.hpp>

#include "tuning/choice.hpp"

namespace annulus::ring {

/// Plans worth timing: every schedule that can run and is not pointless, with its ulysses degrees,
/// inner sizes and sizes of head groups, by each transport, with each implementation preferred or
/// none. The plan that heuristics choose comes first, then the best of each schedule, in order of
/// predicted time, then the others in that order. Plans are passed over, with the reason, and come
/// last if they are predicted to take more than `limits.factor` times the best, exceed
/// `limits.candidates`, or cannot be made.
///
/// `schedule` is the call's, or "auto"; `transports` are the possible ones, the default first, if
/// the transport is open. Plans of the same schedule with exactly the same predicted time count as
/// one. Not collective.
[[nodiscard]] std::vector<TunedCandidate> tuning_candidates(
    const PlanInput& input, const OpenChoices& open, const std::string& schedule,
    const std::vector<Transport>& transports, const TuningOptions& limits);

/// Why this choice cannot be planned; "" if it can.
[[nodiscard]] std::string obstacle_of(const Choice& choice, const PlanInput& input,
                                      const std::string& schedule);

}  // namespace annulus::ring
