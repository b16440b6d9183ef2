#include "schedules/building/gather_rounds.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace annulus::ring {
namespace {

bool before(const GatherMessage& a, const GatherMessage& b) {
  return std::pair(a.origin, a.columns().begin) < std::pair(b.origin, b.columns().begin);
}

}  // namespace

// Bytes of one head of a token's key and value, for all batches of the rank.
std::int64_t token_bytes_per_head(const RankContext& context) {
  const AttentionShape& shape = context.input.problem.shape;
  return context.input.operands.key.local_shape(context.rank)[0] *
         (shape.head_dim + shape.value_dim) *
         static_cast<std::int64_t>(size_of(context.input.problem.dtype));
}

std::vector<HeadRange> gathered_heads(const RankContext& context, std::int64_t more_bytes) {
  const PlanInput& input = context.input;
  const Extents key = input.operands.key.local_shape(context.rank);
  // Bounded by the whole sequence, so that every rank of the group finds the same groups of heads.
  const std::int64_t bytes_per_head =
      input.problem.shape.kv_length * token_bytes_per_head(context) + more_bytes;
  const std::int64_t heads =
      std::clamp(input.options.gather_bytes / std::max<std::int64_t>(bytes_per_head, 1),
                 std::int64_t{1}, std::max<std::int64_t>(key[2], 1));
  std::vector<HeadRange> groups;
  for (std::int64_t begin = 0; begin < key[2]; begin += heads) {
    groups.push_back({begin, std::min(heads, key[2] - begin)});
  }
  return groups;
}

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

std::vector<GatherMessage> by_origin(std::vector<GatherMessage> arrivals) {
  std::sort(arrivals.begin(), arrivals.end(), before);
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

GatherRounds::GatherRounds(TaskBuilder& builder, const GatherRoutes& routes, int me)
    : builder_(builder),
      me_(me),
      arrivals_(routes.to(me)),
      departures_(routes.from(me)),
      tokens_(place(arrivals_)),
      pieces_(placed_pieces(arrivals_)),
      last_(routes.steps() - 1),
      receive_(last_ > 0 ? 3 : 2, -1) {
  by_origin_ = annulus::ring::by_origin(arrivals_);
  arrivals_ = by_turn(std::move(arrivals_), me, builder.context().needs.size());
  for (const GatherMessage& sent : departures_) {
    if (sent.origin == me) sent_own_ = hull(sent_own_, sent.columns());
  }
}

// In the last of several steps nothing crosses between nodes, so it is also the first step of the
// next round. That round arrives while this one is passed on and the previous one is computed.
int GatherRounds::first_step(std::size_t g) const {
  return static_cast<int>(g) * std::max(last_, 1);
}

// The tokens, in the receive buffer, of columns that the rank passes on: in the last arrival that
// begins no later.
LocalRange GatherRounds::passed_on(const GatherMessage& sent) const {
  const GatherMessage& held =
      *std::prev(std::upper_bound(by_origin_.begin(), by_origin_.end(), sent, before));
  const LocalRange columns = sent.columns();
  return {LocalPosition(held.token + (columns.begin - held.columns().begin)), columns.count};
}

void GatherRounds::add(std::size_t g, HeadRange kv_heads) {
  const int packed = sent_own_.count > 0 ? builder_.add_packed(sent_own_, kv_heads) : -1;
  int& buffer = receive_[g % receive_.size()];
  if (tokens_ > 0) {
    buffer = builder_.add_key_value({LocalPosition(0), tokens_}, kv_heads, buffer);
  }
  for (const GatherMessage& sent : departures_) {
    const bool own = sent.origin == me_;
    builder_.send(first_step(g) + sent.step, sent.receiver, sent.origin, own ? packed : buffer,
                  own ? sent.columns() : passed_on(sent));
  }
  for (const GatherMessage& arrival : arrivals_) {
    builder_.receive(first_step(g) + arrival.step, arrival.source, arrival.origin, buffer,
                     placed(arrival));
  }
}

PlacedColumns GatherRounds::gathered(std::size_t g) const {
  const int buffer = receive_[g % receive_.size()];
  return {buffer, buffer, pieces_};
}

}  // namespace annulus::ring
