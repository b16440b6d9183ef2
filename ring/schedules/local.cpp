#include "schedules/schedules.hpp"
#include "schedules/step_builder.hpp"

namespace annulus::ring {

RankPlan plan_local(const RankContext& context) {
  StepBuilder builder(context);
  const HeadRange kv_heads{0, context.operands.key.local_shape(context.rank)[2]};
  builder.add_block(0, 0, kv_heads, builder.own_columns());
  return builder.finish();
}

}  // namespace annulus::ring
