#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "schedules/plan_builder.hpp"
#include "schedules/schedules.hpp"

// Every rank gets all the columns that it needs at once, straight from their owners, in order of
// global position. To bound memory this happens for one group of key/value heads after another.
// While a group is on its way, its local columns and the arrivals of the group before are computed.
namespace annulus::ring {
namespace {

std::vector<HeadRange> head_groups(const RankContext& context) {
  const PlanInput& input = context.input;
  const Extents key = input.operands.key.local_shape(context.rank);
  const AttentionShape& shape = input.problem.shape;
  // Bounded by the whole sequence, so that every rank of the group finds the same groups of heads.
  const std::int64_t bytes_per_head = shape.kv_length * key[0] *
                                      (shape.head_dim + shape.value_dim) *
                                      static_cast<std::int64_t>(size_of(input.problem.dtype));
  const std::int64_t heads =
      std::clamp(input.options.gather_bytes / std::max<std::int64_t>(bytes_per_head, 1),
                 std::int64_t{1}, std::max<std::int64_t>(key[2], 1));
  std::vector<HeadRange> groups;
  for (std::int64_t begin = 0; begin < key[2]; begin += heads) {
    groups.push_back({begin, std::min(heads, key[2] - begin)});
  }
  return groups;
}

// A message from `origin`: neighbouring columns, which arrive at token `token` and after.
struct Arrival {
  int origin;
  std::vector<ColumnPiece> pieces;
  std::int64_t token = 0;

  [[nodiscard]] GlobalPosition start() const { return pieces.front().positions.start; }
  [[nodiscard]] LocalRange columns() const {
    const LocalPosition begin = pieces.front().columns.begin;
    return {begin, pieces.back().columns.end() - begin};
  }
};

// The messages in local order. Each piece is a message, so that all can be placed in order of
// position. If that would be too many messages, neighbouring pieces share one.
std::vector<Arrival> messages(const KvNeeds& needs, int receiver, int origin) {
  const std::vector<ColumnPiece>& pieces = needs.of(receiver, origin);
  std::vector<Arrival> result;
  if (pieces.size() <= KvNeeds::kMostMessages) {
    for (const ColumnPiece& piece : pieces) result.push_back({origin, {piece}});
  } else {
    for (std::vector<ColumnPiece>& message : joined(pieces)) {
      result.push_back({origin, std::move(message)});
    }
  }
  return result;
}

std::vector<Arrival> arrivals_of(const KvNeeds& needs, int receiver) {
  std::vector<Arrival> arrivals;
  for (int origin = 0; origin < needs.size(); ++origin) {
    if (origin == receiver) continue;
    for (Arrival& message : messages(needs, receiver, origin)) {
      arrivals.push_back(std::move(message));
    }
  }
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [](const Arrival& a, const Arrival& b) { return a.start() < b.start(); });
  std::int64_t token = 0;
  for (Arrival& arrival : arrivals) {
    arrival.token = token;
    token += arrival.columns().count;
  }
  return arrivals;
}

}  // namespace

RankPlan plan_allgather(const RankContext& context) {
  const KvNeeds& needs = context.needs;
  const int me = context.group_rank;
  const std::vector<HeadRange> groups = head_groups(context);
  const std::vector<Arrival> arrivals = arrivals_of(needs, me);
  PlanBuilder builder(context);

  // Every rank begins with its left neighbour, so that not all read from the same rank at once.
  std::vector<Arrival> by_turn = arrivals;
  std::stable_sort(by_turn.begin(), by_turn.end(), [&](const Arrival& a, const Arrival& b) {
    const auto turn = [&](const Arrival& arrival) {
      return (me + needs.size() - arrival.origin) % needs.size();
    };
    return turn(a) < turn(b);
  });

  LocalRange sent;
  for (int receiver = 0; receiver < needs.size(); ++receiver) {
    if (receiver == me) continue;
    for (const ColumnPiece& piece : needs.of(receiver, me)) sent = hull(sent, piece.columns);
  }

  std::vector<PlacedPiece> placed;
  for (const Arrival& arrival : arrivals) {
    std::int64_t token = arrival.token;
    for (const ColumnPiece& piece : arrival.pieces) {
      placed.push_back({piece, token});
      token += piece.columns.count;
    }
  }
  const std::int64_t tokens =
      placed.empty() ? 0 : placed.back().token + placed.back().piece.columns.count;

  std::array<int, 2> receive{-1, -1};
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const int step = static_cast<int>(g);
    // Arrivals of the group before go first, so that the results of one group of heads stay
    // together.
    if (g > 0 && tokens > 0) {
      const int gathered = receive[(g - 1) % 2];
      builder.compute(step, gathered, gathered, groups[g - 1], placed);
    }
    builder.compute_own(step, groups[g]);
    if (sent.count > 0) {
      const int packed = builder.add_packed(sent, groups[g]);
      // Receivers sort their arrivals, but those from one origin stay in the order of positions,
      // which is that of the chunks: messages between two ranks match.
      for (int i = 1; i < needs.size(); ++i) {
        const int receiver = (me + i) % needs.size();
        for (const Arrival& message : messages(needs, receiver, me)) {
          builder.send(step, receiver, me, packed, message.columns());
        }
      }
    }
    if (tokens == 0) continue;
    int& buffer = receive[g % 2];
    buffer = builder.add_key_value({LocalPosition(0), tokens}, groups[g], buffer);
    for (const Arrival& arrival : by_turn) {
      builder.receive(step, arrival.origin, arrival.origin, buffer,
                      {LocalPosition(arrival.token), arrival.columns().count});
    }
  }
  if (tokens > 0 && !groups.empty()) {
    const int gathered = receive[(groups.size() - 1) % 2];
    builder.compute(static_cast<int>(groups.size()), gathered, gathered, groups.back(), placed);
  }
  return builder.finish();
}

}  // namespace annulus::ring
