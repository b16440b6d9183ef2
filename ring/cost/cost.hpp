#pragma once

#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Predicted seconds of a task that a rank does by itself. Tasks are priced only here.
[[nodiscard]] double seconds_of(const RankPlan& plan, const Block& block, const CostModel& model);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Copy& copy, const CostModel& model);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Reduce& reduce, const CostModel& model);

/// Predicted seconds of one side's messages of an exchange.
[[nodiscard]] double seconds_of(const std::vector<Transfer>& transfers, const CostModel& model);

}  // namespace annulus::ring
