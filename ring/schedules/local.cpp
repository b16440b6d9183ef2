#include "schedules/building/plan_builder.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {

RankPlan plan_local(const RankContext& context) {
  PlanBuilder builder(context);
  const HeadRange heads{0, builder.plan().local.heads};
  builder.compute(0, PlanBuilder::kOwnRows, heads, builder.own_columns());
  builder.complete(0, PlanBuilder::kOwnRows, heads);
  return builder.finish();
}

}  // namespace annulus::ring
