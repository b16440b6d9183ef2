#pragma once

#include <vector>

#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// By step: whether it receives into memory that an earlier step computes on, so that what it
/// receives waits for that (what it sends does not).
[[nodiscard]] std::vector<bool> overwriting_steps(const RankPlan& plan);

}  // namespace annulus::ring
