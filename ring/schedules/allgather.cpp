#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include <annulus/mesh/transport.hpp>

#include "schedules/gather_routes.hpp"
#include "schedules/plan_builder.hpp"
#include "schedules/schedules.hpp"

// Every rank gets all the columns that it needs at once, in order of global position: straight from
// their owners, or from a rank of its node that has got them from another node. To bound memory
// this happens for one group of key/value heads after another. While a group is on its way, its
// local columns and the arrivals of the group before are computed.
// Where kernels can await columns, one kernel instead computes all columns of a group as they
// arrive.
namespace annulus::ring {
namespace {

// Bytes of one head of a token's key and value, for all batches of the rank.
std::int64_t token_bytes_per_head(const RankContext& context) {
  const AttentionShape& shape = context.input.problem.shape;
  return context.input.operands.key.local_shape(context.rank)[0] *
         (shape.head_dim + shape.value_dim) *
         static_cast<std::int64_t>(size_of(context.input.problem.dtype));
}

std::vector<HeadRange> head_groups(const RankContext& context) {
  const PlanInput& input = context.input;
  const Extents key = input.operands.key.local_shape(context.rank);
  // Bounded by the whole sequence, so that every rank of the group finds the same groups of heads.
  const std::int64_t bytes_per_head = input.problem.shape.kv_length * token_bytes_per_head(context);
  const std::int64_t heads =
      std::clamp(input.options.gather_bytes / std::max<std::int64_t>(bytes_per_head, 1),
                 std::int64_t{1}, std::max<std::int64_t>(key[2], 1));
  std::vector<HeadRange> groups;
  for (std::int64_t begin = 0; begin < key[2]; begin += heads) {
    groups.push_back({begin, std::min(heads, key[2] - begin)});
  }
  return groups;
}

// Every rank first receives from its left neighbour, so that not all read from one rank at once.
int turn_of(int source, int receiver, int ranks) {
  return (receiver + ranks - source) % ranks;
}

std::vector<GatherMessage> by_turn(std::vector<GatherMessage> arrivals, int me, int ranks) {
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [&](const GatherMessage& a, const GatherMessage& b) {
                     return turn_of(a.source, me, ranks) < turn_of(b.source, me, ranks);
                   });
  return arrivals;
}

std::int64_t place(std::vector<GatherMessage>& arrivals) {
  std::int64_t token = 0;
  for (GatherMessage& arrival : arrivals) {
    arrival.token = token;
    token += arrival.columns().count;
  }
  return token;
}

std::vector<PlacedPiece> placed_pieces(const std::vector<GatherMessage>& arrivals) {
  std::vector<PlacedPiece> placed;
  for (const GatherMessage& arrival : arrivals) {
    std::int64_t token = arrival.token;
    for (const ColumnPiece& piece : arrival.pieces) {
      placed.push_back({piece, token});
      token += piece.columns.count;
    }
  }
  return placed;
}

LocalRange placed(const GatherMessage& arrival) {
  return {LocalPosition(arrival.token), arrival.columns().count};
}

// Finds columns of others, which a rank passes on, in its receive buffer.
class PassedOn {
 public:
  explicit PassedOn(std::vector<GatherMessage> arrivals) : arrivals_(std::move(arrivals)) {
    std::sort(arrivals_.begin(), arrivals_.end(), before);
  }

  [[nodiscard]] LocalRange tokens_of(const GatherMessage& sent) const {
    // The last arrival that begins no later.
    const GatherMessage& held =
        *std::prev(std::upper_bound(arrivals_.begin(), arrivals_.end(), sent, before));
    const LocalRange columns = sent.columns();
    return {LocalPosition(held.token + (columns.begin - held.columns().begin)), columns.count};
  }

 private:
  static bool before(const GatherMessage& a, const GatherMessage& b) {
    return std::pair(a.origin, a.columns().begin) < std::pair(b.origin, b.columns().begin);
  }

  std::vector<GatherMessage> arrivals_;
};

// Whether kernels may begin before their columns have arrived. All ranks of a group get the same
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

// Puts all columns of a group of heads into one buffer: the rank's own at its end, before them
// those of its left neighbour, and so on, in order of arrival. One kernel computes them all and
// awaits each. No results are handed over between kernels, and only the first tiles wait for
// transfers.
RankPlan plan_awaiting(const RankContext& context, const GatherRoutes& routes,
                       const std::vector<HeadRange>& groups) {
  const int ranks = context.needs.size();
  const int me = context.group_rank;
  std::vector<GatherMessage> arrivals = by_turn(routes.to(me), me, ranks);
  std::reverse(arrivals.begin(), arrivals.end());
  const std::int64_t arriving = place(arrivals);
  std::vector<PlacedPiece> placed_columns = placed_pieces(arrivals);
  std::reverse(arrivals.begin(), arrivals.end());  // between two ranks, messages match in order
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
    builder.pack({LocalPosition(0), own}, buffer, LocalPosition(arriving));
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
    // After the exchanges of the same step: what the kernel awaits is submitted before it.
    const HeadRange heads = builder.query_heads(group);
    builder.compute_awaiting(step - 1, PlanBuilder::kOwnRows, heads,
                             {buffer, buffer, placed_columns});
    builder.complete(step - 1, PlanBuilder::kOwnRows, heads);
  }
  return builder.finish();
}

}  // namespace

RankPlan plan_allgather(const RankContext& context) {
  const int me = context.group_rank;
  const GatherRoutes routes(context.needs, context.nodes);
  const std::vector<HeadRange> groups = head_groups(context);
  if (may_await(context, routes)) return plan_awaiting(context, routes, groups);
  std::vector<GatherMessage> arrivals = routes.to(me);
  const std::int64_t tokens = place(arrivals);
  const std::vector<PlacedPiece> placed_columns = placed_pieces(arrivals);
  const PassedOn passed_on(arrivals);
  // Those from one rank stay in order of position, so that messages between two ranks match.
  arrivals = by_turn(std::move(arrivals), me, context.needs.size());
  const std::vector<GatherMessage> departures = routes.from(me);
  LocalRange sent_own;
  for (const GatherMessage& sent : departures) {
    if (sent.origin == me) sent_own = hull(sent_own, sent.columns());
  }

  PlanBuilder builder(context);
  // In the last of several steps nothing crosses between nodes, so it is also the first step of the
  // next group. That group arrives while this one is passed on and the one before is computed.
  const int last = routes.steps() - 1;
  const auto first_step = [&](std::size_t g) { return static_cast<int>(g) * std::max(last, 1); };
  std::vector<int> receive(last > 0 ? 3 : 2, -1);  // buffers
  // Arrivals go before the next group's own columns, so that the results of one group of heads stay
  // together. They are computed while the group after them is on its way.
  const auto compute_arrivals = [&](std::size_t g) {
    const int step = first_step(g) + last + 1;
    const HeadRange heads = builder.query_heads(groups[g]);
    const int gathered = receive[g % receive.size()];
    if (tokens > 0) {
      builder.compute(step, PlanBuilder::kOwnRows, heads, {gathered, gathered, placed_columns});
    }
    builder.complete(step, PlanBuilder::kOwnRows, heads);
    return step;
  };
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const int step = g > 0 ? compute_arrivals(g - 1) : 0;
    builder.compute(step, PlanBuilder::kOwnRows, builder.query_heads(groups[g]),
                    builder.own_columns());
    const int packed = sent_own.count > 0 ? builder.add_packed(sent_own, groups[g]) : -1;
    int& buffer = receive[g % receive.size()];
    if (tokens > 0) {
      buffer = builder.add_key_value({LocalPosition(0), tokens}, groups[g], buffer);
    }
    for (const GatherMessage& sent : departures) {
      const bool own = sent.origin == me;
      builder.send(first_step(g) + sent.step, sent.receiver, sent.origin, own ? packed : buffer,
                   own ? sent.columns() : passed_on.tokens_of(sent));
    }
    for (const GatherMessage& arrival : arrivals) {
      builder.receive(first_step(g) + arrival.step, arrival.source, arrival.origin, buffer,
                      placed(arrival));
    }
  }
  if (!groups.empty()) compute_arrivals(groups.size() - 1);
  return builder.finish();
}

}  // namespace annulus::ring
