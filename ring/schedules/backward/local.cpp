#include "schedules/backward/backward_builder.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {

// Serves ranks with the same rows and different columns too: the gradients of the rows are then
// summed over the ranks.
RankPlan plan_local_backward(const RankContext& context) {
  BackwardBuilder builder(context);
  builder.compute(0, BackwardBuilder::kOwnRows, {0, builder.plan().local.heads},
                  builder.own_columns(), builder.own_columns_gradients());
  builder.finish_rows(0);
  builder.finish_columns(0);
  return builder.finish();
}

}  // namespace annulus::ring
