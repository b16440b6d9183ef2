#include "schedules/schedules.hpp"
#include "schedules/step_builder.hpp"

namespace annulus::ring {

RankPlan plan_local(const RankContext& context) {
  StepBuilder builder(context);
  builder.add_block(0, 0, builder.own_columns());
  return builder.finish();
}

}  // namespace annulus::ring
