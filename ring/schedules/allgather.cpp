#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include <annulus/mesh/transport.hpp>

#include "schedules/plan_builder.hpp"
#include "schedules/schedules.hpp"

// Every rank gets all the columns that it needs at once, straight from their owners, in order of
// global position. To bound memory this happens for one group of key/value heads after another.
// While a group is on its way, its local columns and the arrivals of the group before are computed.
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

// Neighbouring columns of `origin`.
struct Message {
  int origin;
  std::vector<ColumnPiece> pieces;
  std::int64_t token = 0;  ///< of the buffer, where they are put

  [[nodiscard]] GlobalPosition start() const { return pieces.front().positions.start; }
  [[nodiscard]] LocalRange columns() const {
    const LocalPosition begin = pieces.front().columns.begin;
    return {begin, pieces.back().columns.end() - begin};
  }
};

// The messages in local order. Each piece is a message, so that all can be placed in order of
// position. If that would be too many messages, neighbouring pieces share one.
std::vector<Message> messages(const KvNeeds& needs, int receiver, int origin) {
  const std::vector<ColumnPiece>& pieces = needs.of(receiver, origin);
  std::vector<Message> result;
  if (pieces.size() <= KvNeeds::kMostMessages) {
    for (const ColumnPiece& piece : pieces) result.push_back({origin, {piece}});
  } else {
    for (std::vector<ColumnPiece>& message : joined(pieces)) {
      result.push_back({origin, std::move(message)});
    }
  }
  return result;
}

std::vector<Message> arrivals_of(const KvNeeds& needs, int receiver) {
  std::vector<Message> arrivals;
  for (int origin = 0; origin < needs.size(); ++origin) {
    if (origin == receiver) continue;
    for (Message& message : messages(needs, receiver, origin)) {
      arrivals.push_back(std::move(message));
    }
  }
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [](const Message& a, const Message& b) { return a.start() < b.start(); });
  return arrivals;
}

// Every rank first receives from its left neighbour, so that not all read from one rank at once.
int turn_of(int origin, int receiver, int ranks) {
  return (receiver + ranks - origin) % ranks;
}

std::vector<Message> by_turn(std::vector<Message> arrivals, int me, int ranks) {
  std::stable_sort(arrivals.begin(), arrivals.end(), [&](const Message& a, const Message& b) {
    return turn_of(a.origin, me, ranks) < turn_of(b.origin, me, ranks);
  });
  return arrivals;
}

std::int64_t place(std::vector<Message>& arrivals) {
  std::int64_t token = 0;
  for (Message& arrival : arrivals) {
    arrival.token = token;
    token += arrival.columns().count;
  }
  return token;
}

std::vector<PlacedPiece> placed_pieces(const std::vector<Message>& arrivals) {
  std::vector<PlacedPiece> placed;
  for (const Message& arrival : arrivals) {
    std::int64_t token = arrival.token;
    for (const ColumnPiece& piece : arrival.pieces) {
      placed.push_back({piece, token});
      token += piece.columns.count;
    }
  }
  return placed;
}

// Whether kernels may begin before their columns have arrived. All ranks of a group get the same
// answer, since their exchanges must match.
bool may_await(const RankContext& context) {
  const PlanInput& input = context.input;
  const TransportTraits& transport = transport_traits(input.prices.model.transport);
  const Extents key = input.operands.key.local_shape(context.rank);
  // A waiting kernel may occupy all multiprocessors: transfers must be able to run without them.
  return input.options.await_columns && context.needs.size() > 1 && transport.one_sided &&
         transport.ahead &&
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
RankPlan plan_awaiting(const RankContext& context, const std::vector<HeadRange>& groups) {
  const KvNeeds& needs = context.needs;
  const int me = context.group_rank;
  std::vector<Message> arrivals = by_turn(arrivals_of(needs, me), me, needs.size());
  std::reverse(arrivals.begin(), arrivals.end());
  const std::int64_t arriving = place(arrivals);
  std::vector<PlacedPiece> placed = placed_pieces(arrivals);
  std::reverse(arrivals.begin(), arrivals.end());  // between two ranks, messages match in order
  const std::int64_t own = context.input.operands.key.local_shape(context.rank)[1];

  PlanBuilder builder(context);
  for (PlacedPiece piece : builder.own_columns().pieces) {
    piece.token += arriving;
    placed.push_back(std::move(piece));
  }
  int step = 0;
  for (const HeadRange& group : groups) {
    const int buffer = builder.add_key_value({LocalPosition(0), arriving + own}, group);
    builder.pack({LocalPosition(0), own}, buffer, LocalPosition(arriving));
    for (int turn = 1; turn < needs.size(); ++turn, ++step) {
      const int receiver = (me + turn) % needs.size();
      for (const Message& message : messages(needs, receiver, me)) {
        const LocalRange columns = message.columns();
        builder.send(step, receiver, me, buffer, {columns.begin + arriving, columns.count});
      }
      for (const Message& arrival : arrivals) {
        if (turn_of(arrival.origin, me, needs.size()) != turn) continue;
        builder.receive(step, arrival.origin, arrival.origin, buffer,
                        {LocalPosition(arrival.token), arrival.columns().count});
      }
    }
    // After the exchanges of the same step: what the kernel awaits is submitted before it.
    const HeadRange heads = builder.query_heads(group);
    builder.compute_awaiting(step - 1, PlanBuilder::kOwnRows, heads, {buffer, buffer, placed});
    builder.complete(step - 1, PlanBuilder::kOwnRows, heads);
  }
  return builder.finish();
}

}  // namespace

RankPlan plan_allgather(const RankContext& context) {
  const KvNeeds& needs = context.needs;
  const int me = context.group_rank;
  const std::vector<HeadRange> groups = head_groups(context);
  if (may_await(context)) return plan_awaiting(context, groups);
  std::vector<Message> arrivals = arrivals_of(needs, me);
  const std::int64_t tokens = place(arrivals);
  const std::vector<PlacedPiece> placed = placed_pieces(arrivals);
  PlanBuilder builder(context);

  LocalRange sent;
  for (int receiver = 0; receiver < needs.size(); ++receiver) {
    if (receiver == me) continue;
    for (const ColumnPiece& piece : needs.of(receiver, me)) sent = hull(sent, piece.columns);
  }

  std::array<int, 2> receive{-1, -1};
  // Arrivals go before the next group's own columns, so that the results of one group of heads stay
  // together.
  const auto compute_arrivals = [&](int step, std::size_t g) {
    const HeadRange heads = builder.query_heads(groups[g]);
    const int gathered = receive[g % 2];
    if (tokens > 0) {
      builder.compute(step, PlanBuilder::kOwnRows, heads, {gathered, gathered, placed});
    }
    builder.complete(step, PlanBuilder::kOwnRows, heads);
  };
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const int step = static_cast<int>(g);
    if (g > 0) compute_arrivals(step, g - 1);
    builder.compute(step, PlanBuilder::kOwnRows, builder.query_heads(groups[g]),
                    builder.own_columns());
    if (sent.count > 0) {
      const int packed = builder.add_packed(sent, groups[g]);
      // Receivers sort their arrivals, but those from one origin stay in the order of positions,
      // which is that of the chunks: messages between two ranks match.
      for (int i = 1; i < needs.size(); ++i) {
        const int receiver = (me + i) % needs.size();
        for (const Message& message : messages(needs, receiver, me)) {
          builder.send(step, receiver, me, packed, message.columns());
        }
      }
    }
    if (tokens == 0) continue;
    int& buffer = receive[g % 2];
    buffer = builder.add_key_value({LocalPosition(0), tokens}, groups[g], buffer);
    for (const Message& arrival : by_turn(arrivals, me, needs.size())) {
      builder.receive(step, arrival.origin, arrival.origin, buffer,
                      {LocalPosition(arrival.token), arrival.columns().count});
    }
  }
  if (!groups.empty()) compute_arrivals(static_cast<int>(groups.size()), groups.size() - 1);
  return builder.finish();
}

}  // namespace annulus::ring
