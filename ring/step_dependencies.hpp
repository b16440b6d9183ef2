#pragma once

#include <vector>

#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// By step: whether it receives into memory that an earlier step computes on, so that its transfers
/// wait for that.
[[nodiscard]] std::vector<bool> overwriting_steps(const RankPlan& plan);

}  // namespace annulus::ring
