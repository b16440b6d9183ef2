#pragma once

#include <string>

#include <annulus/ring/planner.hpp>

namespace annulus::ring {

/// Why the bits of a block, computed by `kernel`, would depend on the sharding of the problem;
/// empty if they do not. Each row must see all keys in one block and in global order, and must not
/// share a row tile with rows that are elsewhere; in the backward pass, each key must see all rows
/// of all query heads that read it. Sums over ranks are refused, too.
[[nodiscard]] std::string order_obstacle(const Declaration& kernel, const PlanInput& input,
                                         const RankPlan& plan, const Tile& block);

}  // namespace annulus::ring
