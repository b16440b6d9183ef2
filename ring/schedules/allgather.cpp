#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

#include "schedules/building/gather_rounds.hpp"
#include "schedules/building/gather_routes.hpp"
#include "schedules/building/gathering.hpp"
#include "schedules/building/plan_builder.hpp"
#include "schedules/schedules.hpp"

// Every rank gets all columns that it needs at once, in order of global position: straight from
// their owners, or from a rank of its node that got them from another node. To bound memory, groups
// of key/value heads are gathered one after another. While a group is on its way, its local columns
// and the arrivals of the previous group are computed. If kernels can await columns, one kernel
// instead computes all columns of a group as they arrive.
namespace annulus::ring {
namespace {

// True if kernels may begin before their columns have arrived. All ranks of a group get the same
// answer, since their exchanges must match.
bool may_await(const RankContext& context, const GatherRoutes& routes) {
  const PlanInput& input = context.input;
  const TransportTraits& transport = transport_traits(input.prices.model.transport);
  const Extents key = input.operands.key.local_shape(context.rank);
  // A waiting kernel may occupy all multiprocessors: transfers must be able to run without them.
  return input.options.await_columns && context.needs.size() > 1 && routes.steps() == 1 &&
         transport.one_sided && transport.ahead &&
         input.problem.shape.kv_length * key[2] * token_bytes_per_head(context) <=
             input.options.prefetch_bytes &&
         std::any_of(input.candidates.begin(), input.candidates.end(),
                     [&](const Implementation* candidate) {
                       return candidate->awaits_columns(input.problem);
                     });
}

// Puts all columns of a group of heads into one buffer: the rank's own at its end, before them its
// left neighbour's, and so on in order of arrival. One kernel computes all columns, awaiting each.
// So no results are handed over between kernels, and only the first tiles wait for transfers.
RankPlan plan_awaiting(const RankContext& context, const GatherRoutes& routes,
                       const std::vector<HeadRange>& groups) {
  const int ranks = context.needs.size();
  const int me = context.group_rank;
  std::vector<GatherMessage> arrivals = by_turn(routes.to(me), me, ranks);
  std::reverse(arrivals.begin(), arrivals.end());
  const std::int64_t arriving = place(arrivals);
  std::vector<PlacedPiece> placed_columns = placed_pieces(arrivals);
  std::reverse(arrivals.begin(), arrivals.end());  // messages between two ranks match in order
  const std::vector<GatherMessage> departures = routes.from(me);
  const std::int64_t own = context.input.operands.key.local_shape(context.rank)[1];

  PlanBuilder builder(context);
  for (PlacedPiece piece : builder.own_columns().pieces) {
    piece.token += arriving;
    placed_columns.push_back(std::move(piece));
  }
  int step = 0;
  for (const HeadRange& group : groups) {
    const int buffer = builder.add_key_value({LocalPosition(0), arriving + own}, group);
    builder.copy_own(0, buffer, LocalPosition(0), {LocalPosition(arriving), own});
    for (const GatherMessage& sent : departures) {
      const LocalRange columns = sent.columns();
      builder.send(step + turn_of(me, sent.receiver, ranks) - 1, sent.receiver, me, buffer,
                   {columns.begin + arriving, columns.count});
    }
    for (const GatherMessage& arrival : arrivals) {
      builder.receive(step + turn_of(arrival.source, me, ranks) - 1, arrival.source, arrival.origin,
                      buffer, placed(arrival));
    }
    step += ranks - 1;
    // Comes after the exchanges of the same step, so the kernel's columns are requested before it
    // runs.
    const HeadRange heads = builder.query_heads(group);
    builder.compute_awaiting(step - 1, PlanBuilder::kOwnRows, heads,
                             {buffer, buffer, placed_columns});
    builder.complete(step - 1, PlanBuilder::kOwnRows, heads);
  }
  return builder.finish();
}

// Every rank gets all columns of a group of heads and computes them in one block, in order of
// global position, so the bits do not depend on the number of ranks.
RankPlan plan_in_order(const RankContext& context, const std::vector<HeadRange>& groups) {
  const Gathering columns = gathering_of(context, context.group, &HeldSequence::columns);
  PlanBuilder builder(context);
  std::array<int, 2> buffers{-1, -1};  // groups take turns
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const int step = static_cast<int>(g);
    int& buffer = buffers[g % 2];
    buffer = builder.add_key_value(columns.all(), groups[g], buffer);
    builder.gather(step, buffer, columns);
    const HeadRange heads = builder.query_heads(groups[g]);
    builder.compute(step, PlanBuilder::kOwnRows, heads, {buffer, buffer, columns.pieces()});
    builder.complete(step, PlanBuilder::kOwnRows, heads);
  }
  return builder.finish();
}

}  // namespace

RankPlan plan_allgather(const RankContext& context) {
  const int me = context.group_rank;
  const GatherRoutes routes(context.needs, context.nodes);
  const std::vector<HeadRange> groups = gathered_heads(context);
  if (context.input.problem.in_global_order() && context.needs.size() > 1) {
    return plan_in_order(context, groups);
  }
  if (may_await(context, routes)) return plan_awaiting(context, routes, groups);
  PlanBuilder builder(context);
  GatherRounds rounds(builder, routes, me);
  // Arrivals are computed before the next group's own columns, so that the results of one group of
  // heads stay together, and while that group is on its way.
  const auto compute_arrivals = [&](std::size_t g) {
    const int step = rounds.arrived_in(g);
    const HeadRange heads = builder.query_heads(groups[g]);
    if (rounds.tokens() > 0) {
      builder.compute(step, PlanBuilder::kOwnRows, heads, rounds.gathered(g));
    }
    builder.complete(step, PlanBuilder::kOwnRows, heads);
    return step;
  };
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const int step = g > 0 ? compute_arrivals(g - 1) : 0;
    builder.compute(step, PlanBuilder::kOwnRows, builder.query_heads(groups[g]),
                    builder.own_columns());
    rounds.add(g, groups[g]);
  }
  if (!groups.empty()) compute_arrivals(groups.size() - 1);
  return builder.finish();
}

}  // namespace annulus::ring
