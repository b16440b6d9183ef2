#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "schedules/schedules.hpp"
#include "schedules/step_builder.hpp"

// In hop h (1 ≤ h < P) rank r gets what it needs of rank r − h's columns. They come from the
// neighbour r − 1 if that one got them, or more, in the hop before; otherwise straight from their
// owner, which always has them. So nothing travels through, or to, a rank that does not need it,
// and every rank forwards only what it is computing on: two receive buffers suffice.
namespace annulus::ring {
namespace {

// One message of a hop: columns of `origin` that `receiver` gets from `source`, ending at `slot` of
// its receive buffer.
struct Message {
  int source;
  int origin;
  LocalRange columns;
  std::int64_t slot;
};

class RingTraffic {
 public:
  explicit RingTraffic(const KvNeeds& needs) : needs_(needs) {}

  [[nodiscard]] int wrap(int rank) const { return (rank + needs_.size()) % needs_.size(); }

  // What `receiver` gets in a hop, packed densely into slots 0, 1, ….
  [[nodiscard]] std::vector<PlacedPiece> arrivals(int receiver, int hop) const {
    std::vector<PlacedPiece> placed;
    std::int64_t slot = 0;
    for (const ColumnPiece& piece : needs_.of(receiver, wrap(receiver - hop))) {
      placed.push_back({piece, slot});
      slot += piece.columns.count;
    }
    return placed;
  }

  // Pieces that are neighbours at their owner and come from the same source make one message.
  [[nodiscard]] std::vector<Message> messages(int receiver, int hop) const {
    const int origin = wrap(receiver - hop);
    std::vector<Message> result;
    for (const PlacedPiece& placed : arrivals(receiver, hop)) {
      const LocalRange columns = placed.piece.columns;
      const int source =
          forwards(wrap(receiver - 1), hop - 1, columns) ? wrap(receiver - 1) : origin;
      if (!result.empty() && result.back().source == source &&
          result.back().columns.end() == columns.begin) {
        result.back().columns.count += columns.count;
      } else {
        result.push_back({source, origin, columns, placed.slot});
      }
    }
    return result;
  }

  // The slots where a rank keeps these columns after a hop.
  [[nodiscard]] LocalRange slots_of(int rank, int hop, LocalRange columns) const {
    for (const PlacedPiece& held : arrivals(rank, hop)) {
      const LocalRange& have = held.piece.columns;
      if (have.begin <= columns.begin && columns.begin < have.end()) {
        return {LocalPosition(held.slot + (columns.begin - have.begin)), columns.count};
      }
    }
    return {};
  }

 private:
  // Whether a rank holds all of these columns after a hop, to pass them on.
  [[nodiscard]] bool forwards(int rank, int hop, LocalRange columns) const {
    if (hop == 0) return false;
    const std::vector<PlacedPiece> held = arrivals(rank, hop);
    return std::any_of(held.begin(), held.end(), [&](const PlacedPiece& piece) {
      const LocalRange& have = piece.piece.columns;
      return have.begin <= columns.begin && columns.end() <= have.end();
    });
  }

  const KvNeeds& needs_;
};

}  // namespace

RankPlan plan_ring(const RankContext& context) {
  const RingTraffic traffic(context.needs);
  const int ranks = context.needs.size();
  const int me = context.group_rank;
  StepBuilder builder(context);

  // What leaves from here: my own columns straight to whoever cannot get them from a neighbour, and
  // what I got in the last hop on to my neighbour.
  struct Departure {
    int receiver;
    Message message;
  };
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

  const HeadRange kv_heads{0, context.operands.key.local_shape(context.rank)[2]};
  const int packed = sent_own.count > 0 ? builder.add_packed(sent_own, kv_heads) : -1;
  std::array<int, 2> receive{-1, -1};
  const auto buffer_of = [&](int hop) -> int& {
    return receive[static_cast<std::size_t>(hop % 2)];
  };

  builder.add_block(0, 0, builder.own_columns());
  for (int hop = 1; hop < ranks; ++hop) {
    const auto posted = static_cast<std::size_t>(hop - 1);
    const std::vector<PlacedPiece> arrivals = traffic.arrivals(me, hop);
    if (!arrivals.empty()) {
      int& buffer = buffer_of(hop);
      if (buffer < 0) buffer = builder.add_buffer({BufferKind::receive, 0, kv_heads, {}, -1});
      builder.reserve(buffer, arrivals.back().slot + arrivals.back().piece.columns.count);
      for (const Message& message : traffic.messages(me, hop)) {
        builder.add_receive(posted, message.source, message.origin, buffer,
                            {LocalPosition(message.slot), message.columns.count});
      }
    }
    for (const auto& [receiver, message] : departures[static_cast<std::size_t>(hop)]) {
      if (message.origin == me) {
        builder.add_send(
            posted, receiver, me, packed,
            {LocalPosition(message.columns.begin - sent_own.begin), message.columns.count});
      } else {
        builder.add_send(posted, receiver, message.origin, buffer_of(hop - 1),
                         traffic.slots_of(me, hop - 1, message.columns));
      }
    }
    if (!arrivals.empty()) {
      builder.add_block(static_cast<std::size_t>(hop), buffer_of(hop), arrivals);
    }
  }
  return builder.finish();
}

}  // namespace annulus::ring
