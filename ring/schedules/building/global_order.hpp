#pragma once

#include <string>

#include <annulus/ring/planner.hpp>

namespace annulus::ring {

/// Why the bits of a block, by a kernel that declares this, would depend on how the problem is
/// sharded; empty if they do not. Each row must see all keys in one block and in global order, and
/// must not share a row tile with rows that are elsewhere. For its gradients, each key must
/// likewise see all rows of all query heads that read it. Gradients of a bias that are added up
/// over ranks are refused, too.
[[nodiscard]] std::string order_obstacle(const Declaration& kernel, const PlanInput& input,
                                         const RankPlan& plan, const Tile& block);

}  // namespace annulus::ring
