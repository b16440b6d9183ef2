#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <utility>

#include "schedules/plan_builder.hpp"
#include "schedules/schedules.hpp"

// In hop h (1 ≤ h < P) rank r gets what it needs of rank r − h's columns: straight from their owner
// or, where neighbours are nearer, from r − 1 if that rank got at least these in the hop before. So
// nothing is sent to or through a rank that does not need it, and a rank forwards only what it is
// computing on: two receive buffers suffice.
namespace annulus::ring {
namespace {

// One message of a hop: columns of `origin` that `receiver` gets from `source`, ending at token
// `token` of its receive buffer.
struct Message {
  int source;
  int origin;
  LocalRange columns;
  std::int64_t token;
};

class RingTraffic {
 public:
  RingTraffic(const KvNeeds& needs, bool direct) : needs_(needs), direct_(direct) {}

  [[nodiscard]] int wrap(int rank) const { return (rank + needs_.size()) % needs_.size(); }

  // What `receiver` gets in a hop, side by side from token 0 on.
  [[nodiscard]] std::vector<PlacedPiece> arrivals(int receiver, int hop) const {
    std::vector<PlacedPiece> placed;
    std::int64_t token = 0;
    for (const ColumnPiece& piece : needs_.of(receiver, wrap(receiver - hop))) {
      placed.push_back({piece, token});
      token += piece.columns.count;
    }
    return placed;
  }

  // Pieces that are neighbours at their owner form one message, which comes from one source.
  [[nodiscard]] std::vector<Message> messages(int receiver, int hop) const {
    const int origin = wrap(receiver - hop);
    std::vector<Message> result;
    std::int64_t token = 0;
    for (const LocalRange& columns : runs_of(receiver, hop)) {
      const bool forwarded = forwards(wrap(receiver - 1), hop - 1, columns);
      result.push_back({forwarded ? wrap(receiver - 1) : origin, origin, columns, token});
      token += columns.count;
    }
    return result;
  }

  // Where a rank keeps these columns after a hop.
  [[nodiscard]] LocalRange tokens_of(int rank, int hop, LocalRange columns) const {
    for (const PlacedPiece& held : arrivals(rank, hop)) {
      const LocalRange& have = held.piece.columns;
      if (have.begin <= columns.begin && columns.begin < have.end()) {
        return {LocalPosition(held.token + (columns.begin - have.begin)), columns.count};
      }
    }
    return {};
  }

 private:
  // What a rank receives in a hop, as runs of the owner's columns.
  [[nodiscard]] std::vector<LocalRange> runs_of(int receiver, int hop) const {
    return annulus::ring::runs_of(needs_.of(receiver, wrap(receiver - hop)));
  }

  // Whether a rank holds all of these columns after a hop, to pass them on.
  [[nodiscard]] bool forwards(int rank, int hop, LocalRange columns) const {
    if (direct_ || hop == 0) return false;
    const std::vector<LocalRange> held = runs_of(rank, hop);
    return std::any_of(held.begin(), held.end(), [&](const LocalRange& have) {
      return have.begin <= columns.begin && columns.end() <= have.end();
    });
  }

  const KvNeeds& needs_;
  bool direct_;
};

// What this rank sends: its own columns to ranks that cannot get them from a neighbour, and what it
// got in the last hop to its neighbour.
struct Departure {
  int receiver;
  Message message;
};

// Groups of key/value heads that go round one after the other; the same on every rank of the group.
std::vector<HeadRange> head_groups(const RankContext& context) {
  const PlanInput& input = context.input;
  const std::int64_t kv_heads = input.operands.key.local_shape(context.rank)[2];
  if (input.options.result_bytes == 0 || kv_heads == 0) return {{0, kv_heads}};
  std::int64_t rows = 0;
  for (const int rank : context.needs.group()) {
    const Extents query = input.operands.query.local_shape(rank);
    rows = std::max(rows, query[0] * query[1]);
  }
  const AttentionShape& shape = input.problem.shape;
  const std::int64_t per_head = rows * shape.value_dim * (shape.heads / shape.kv_heads);
  const std::int64_t most = std::max<std::int64_t>(
      input.options.result_bytes, per_head * kv_heads * static_cast<std::int64_t>(sizeof(float)));
  // One result per step, the first of which may lie in the output; more than can be combined at
  // once are folded.
  const std::int64_t each = per_head * static_cast<std::int64_t>(size_of(input.problem.dtype)) *
                            std::min(context.needs.size() - 1, kMostParts - 1);
  const std::int64_t heads =
      std::clamp<std::int64_t>(each == 0 ? kv_heads : most / each, 1, kv_heads);
  const std::int64_t groups = (kv_heads + heads - 1) / heads;
  const std::int64_t most_heads = (kv_heads + groups - 1) / groups;
  std::vector<HeadRange> result;
  for (std::int64_t begin = 0; begin < kv_heads; begin += most_heads) {
    result.push_back({begin, std::min(most_heads, kv_heads - begin)});
  }
  return result;
}

// Whether every hop can have a receive buffer of its own.
bool fits_at_once(const RankContext& context, HeadRange kv_heads,
                  const std::vector<std::int64_t>& arriving) {
  const PlanInput& input = context.input;
  const AttentionShape& shape = input.problem.shape;
  const std::int64_t batch = input.operands.key.local_shape(context.rank)[0];
  const std::int64_t tokens = std::accumulate(arriving.begin(), arriving.end(), std::int64_t{0});
  return tokens * batch * kv_heads.count * (shape.head_dim + shape.value_dim) *
             static_cast<std::int64_t>(size_of(input.problem.dtype)) <=
         input.options.prefetch_bytes;
}

}  // namespace

RankPlan plan_ring(const RankContext& context) {
  const RingTraffic traffic(context.needs, context.input.options.direct);
  const int ranks = context.needs.size();
  const int me = context.group_rank;
  PlanBuilder builder(context);

  std::vector<std::vector<Departure>> departures(static_cast<std::size_t>(ranks));
  LocalRange sent_own;
  for (int hop = 1; hop < ranks; ++hop) {
    auto& of_hop = departures[static_cast<std::size_t>(hop)];
    const auto add = [&](int receiver) {
      for (const Message& message : traffic.messages(receiver, hop)) {
        if (message.source != me) continue;
        of_hop.push_back({receiver, message});
        if (message.origin == me) sent_own = hull(sent_own, message.columns);
      }
    };
    add(traffic.wrap(me + 1));
    if (hop > 1) add(traffic.wrap(me + hop));
  }
  std::vector<std::int64_t> arriving(static_cast<std::size_t>(ranks));  // tokens, by hop
  for (int hop = 1; hop < ranks; ++hop) {
    const std::vector<PlacedPiece> arrivals = traffic.arrivals(me, hop);
    if (arrivals.empty()) continue;
    arriving[static_cast<std::size_t>(hop)] =
        arrivals.back().token + arrivals.back().piece.columns.count;
  }
  const std::vector<HeadRange> groups = head_groups(context);
  const std::size_t buffers = fits_at_once(context, groups.front(), arriving) ? arriving.size() : 2;
  std::vector<std::int64_t> tokens(buffers);
  for (std::size_t hop = 0; hop < arriving.size(); ++hop) {
    std::int64_t& most = tokens[hop % buffers];
    most = std::max(most, arriving[hop]);
  }
  std::vector<int> receive(buffers, -1);
  const auto buffer_of = [&](int hop) { return receive[static_cast<std::size_t>(hop) % buffers]; };
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const int packed = sent_own.count > 0 ? builder.add_packed(sent_own, groups[g]) : -1;
    for (std::size_t i = 0; i < buffers; ++i) {
      if (tokens[i] == 0) continue;
      receive[i] = builder.add_key_value({LocalPosition(0), tokens[i]}, groups[g], receive[i]);
    }
    const int first_step = static_cast<int>(g) * ranks;
    builder.compute_own(first_step, groups[g]);
    for (int hop = 1; hop < ranks; ++hop) {
      const int posted = first_step + hop - 1;
      const int buffer = buffer_of(hop);
      for (const Message& message : traffic.messages(me, hop)) {
        builder.receive(posted, message.source, message.origin, buffer,
                        {LocalPosition(message.token), message.columns.count});
      }
      for (const auto& [receiver, message] : departures[static_cast<std::size_t>(hop)]) {
        if (message.origin == me) {
          builder.send(posted, receiver, me, packed, message.columns);
        } else {
          builder.send(posted, receiver, message.origin, buffer_of(hop - 1),
                       traffic.tokens_of(me, hop - 1, message.columns));
        }
      }
      builder.compute(posted + 1, buffer, buffer, groups[g], traffic.arrivals(me, hop));
    }
  }
  return builder.finish();
}

}  // namespace annulus::ring
