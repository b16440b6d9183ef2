#include <algorithm>
#include <cstdint>
#include <vector>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/division.hpp>

#include "schedules/building/plan_builder.hpp"
#include "schedules/building/ring_rounds.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {
namespace {

// Groups of key/value heads that go round one after the other; the same on every rank of the group.
std::vector<HeadRange> head_groups(const RankContext& context) {
  const PlanInput& input = context.input;
  const std::int64_t kv_heads = input.operands.key.local_shape(context.rank)[2];
  if (input.options.result_bytes == 0 || kv_heads == 0) return {{0, kv_heads}};
  std::int64_t rows = 0;
  for (const int rank : context.group) {
    const Extents query = input.operands.query.local_shape(rank);
    rows = std::max(rows, query[0] * query[1]);
  }
  const AttentionShape& shape = input.problem.shape;
  const std::int64_t per_head = rows * shape.value_dim * (shape.heads / shape.kv_heads);
  const std::int64_t most = std::max<std::int64_t>(
      input.options.result_bytes, per_head * kv_heads * static_cast<std::int64_t>(sizeof(float)));
  // One result per step, the first of which may be in the output. If a reduction cannot combine
  // all, they are folded.
  const std::int64_t each = per_head * static_cast<std::int64_t>(size_of(input.problem.dtype)) *
                            std::min(context.needs.size() - 1, kMaximumParts - 1);
  const std::int64_t heads =
      std::clamp<std::int64_t>(each == 0 ? kv_heads : most / each, 1, kv_heads);
  const std::int64_t groups = ceil_divide(kv_heads, heads);
  const std::int64_t most_heads = ceil_divide(kv_heads, groups);
  std::vector<HeadRange> result;
  for (std::int64_t begin = 0; begin < kv_heads; begin += most_heads) {
    result.push_back({begin, std::min(most_heads, kv_heads - begin)});
  }
  return result;
}

RankPlan plan_rings(const RankContext& context, int inner) {
  PlanBuilder builder(context);
  const RingOrder order{context.needs.size(), inner};
  const bool direct = sends_directly(context, order, [](int member) { return member; });
  const RingTraffic traffic(context.needs, order, direct);
  const std::vector<HeadRange> groups = head_groups(context);
  RingRounds rounds(
      context, builder, traffic, context.group_rank, [](int member) { return member; },
      groups.front().count);
  int step = 0;
  for (const HeadRange& kv_heads : groups) {
    const HeadRange heads = builder.query_heads(kv_heads);
    rounds.add(step, {kv_heads, builder.own_columns()},
               [&](int at, int /*hop*/, const PlacedColumns& columns) {
                 builder.compute(at, PlanBuilder::kOwnRows, heads, columns);
               });
    step += rounds.steps();
    builder.complete(step - 1, PlanBuilder::kOwnRows, heads);
  }
  return builder.finish();
}

}  // namespace

RankPlan plan_ring(const RankContext& context) {
  return plan_rings(context, context.needs.size());
}

RankPlan plan_double_ring(const RankContext& context) {
  return plan_rings(context, inner_size(context.input));
}

}  // namespace annulus::ring
