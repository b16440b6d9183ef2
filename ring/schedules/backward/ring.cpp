#include "schedules/backward/ring_gradients.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {
namespace {

RankPlan plan_rings(const RankContext& context, int inner) {
  BackwardBuilder builder(context);
  const HeadRange heads{0, builder.plan().local.heads};
  const HeadRange kv_heads{0, builder.plan().local.kv_heads};
  RingGradients ring(
      context, builder, context.needs, {context.needs.size(), inner}, context.group_rank,
      [](int member) { return member; }, kv_heads);
  ring.add(0, {kv_heads, builder.own_columns()}, builder.own_columns_gradients(),
           [&](int step, const PlacedColumns& columns, const ColumnGradients& gradients) {
             builder.compute(step, BackwardBuilder::kOwnRows, heads, columns, gradients);
           });
  builder.finish_rows(ring.last_step(0));
  builder.finish_columns(ring.last_step(0));
  return builder.finish();
}

}  // namespace

RankPlan plan_ring_backward(const RankContext& context) {
  return plan_rings(context, context.needs.size());
}

RankPlan plan_double_ring_backward(const RankContext& context) {
  return plan_rings(context, inner_size(context.input));
}

}  // namespace annulus::ring
