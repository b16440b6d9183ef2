#include "schedules/plan_builder.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {

RankPlan plan_local(const RankContext& context) {
  PlanBuilder builder(context);
  builder.compute_own(0, {0, context.input.operands.key.local_shape(context.rank)[2]});
  return builder.finish();
}

}  // namespace annulus::ring
