#include "schedules/building/ring_rounds.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <utility>

namespace annulus::ring {

int RingOrder::origin(int receiver, int hop) const {
  const int rows = members / inner;
  const int row = (receiver / inner + rows - hop / inner % rows) % rows;
  return row * inner + (receiver % inner + inner - hop % inner) % inner;
}

int RingOrder::receiver(int origin, int hop) const {
  const int rows = members / inner;
  const int row = (origin / inner + hop / inner) % rows;
  return row * inner + (origin % inner + hop) % inner;
}

bool sends_directly(const RankContext& context, RingOrder order,
                    const std::function<int(int)>& group_rank) {
  if (!context.input.options.direct) return false;
  // Members first, first + stride, …
  const auto alike = [&](int first, int count, int stride) {
    return context.nodes.are_linked_alike(count,
                                          [&](int i) { return group_rank(first + i * stride); });
  };
  const int rows = order.members / order.inner;
  for (int row = 0; row < rows; ++row) {
    if (!alike(row * order.inner, order.inner, 1)) return false;
  }
  for (int place = 0; rows > 1 && place < order.inner; ++place) {
    if (!alike(place, rows, order.inner)) return false;
  }
  return true;
}

std::vector<PlacedPiece> RingTraffic::arrivals(int receiver, int hop) const {
  std::vector<PlacedPiece> placed;
  std::int64_t token = 0;
  for (const ColumnPiece& piece : needs_.of(receiver, order_.origin(receiver, hop))) {
    placed.push_back({piece, token});
    token += piece.columns.count;
  }
  return placed;
}

RingTraffic::Holder RingTraffic::holder_of(int receiver, int hop) const {
  if (!direct_) {
    // In hop `since` the holder got what the receiver gets now: the neighbour in the row, or the
    // one in the row before.
    const int since = hop - (order_.enters_row(hop) ? order_.inner : 1);
    return {order_.origin(receiver, hop - since), since};
  }
  const int origin = order_.origin(receiver, hop);
  if (order_.enters_row(hop)) return {origin, 0};
  return {receiver / order_.inner * order_.inner + origin % order_.inner, hop - hop % order_.inner};
}

bool RingTraffic::may_send(int sender, int receiver, int hop) const {
  return sender == order_.origin(receiver, hop) || sender == holder_of(receiver, hop).member;
}

std::vector<RingMessage> RingTraffic::messages(int receiver, int hop) const {
  const int origin = order_.origin(receiver, hop);
  const auto [holder, since] = holder_of(receiver, hop);
  std::vector<RingMessage> result;
  std::int64_t token = 0;
  for (const LocalRange& columns : runs_of(receiver, hop)) {
    const bool passed_on = since > 0 && holds(holder, since, columns);
    result.push_back({passed_on ? holder : origin, passed_on ? since : 0, origin, columns, token});
    token += columns.count;
  }
  return result;
}

LocalRange RingTraffic::tokens_of(int member, int hop, LocalRange columns) const {
  for (const PlacedPiece& held : arrivals(member, hop)) {
    const LocalRange& have = held.piece.columns;
    if (have.begin <= columns.begin && columns.begin < have.end()) {
      return {LocalPosition(held.token + (columns.begin - have.begin)), columns.count};
    }
  }
  return {};
}

// The runs of the owner's columns that a member receives in a hop.
std::vector<LocalRange> RingTraffic::runs_of(int receiver, int hop) const {
  return annulus::ring::runs_of(needs_.of(receiver, order_.origin(receiver, hop)));
}

// True if a member holds all of these columns after a hop, to pass them on.
bool RingTraffic::holds(int member, int hop, LocalRange columns) const {
  const std::vector<LocalRange> held = runs_of(member, hop);
  return std::any_of(held.begin(), held.end(), [&](const LocalRange& have) {
    return have.begin <= columns.begin && columns.end() <= have.end();
  });
}

namespace {

// A message between rows costs some microseconds, so it has at least this many bytes.
constexpr std::int64_t kLeastPartBytes = std::int64_t{2} << 20;

// Bytes of a key and a value.
std::int64_t token_bytes(const RankContext& context, std::int64_t kv_heads) {
  const PlanInput& input = context.input;
  const AttentionShape& shape = input.problem.shape;
  const std::int64_t batch = input.operands.key.local_shape(context.rank)[0];
  return batch * kv_heads * (shape.head_dim + shape.value_dim) *
         static_cast<std::int64_t>(size_of(input.problem.dtype));
}

}  // namespace

RingRounds::RingRounds(const RankContext& context, TaskBuilder& builder, const RingTraffic& traffic,
                       int me, std::function<int(int)> group_rank, std::int64_t most_kv_heads)
    : builder_(builder),
      traffic_(traffic),
      me_(me),
      group_rank_(std::move(group_rank)),
      token_bytes_(token_bytes(context, most_kv_heads)) {
  const RingOrder& order = traffic.order();
  const auto hops = static_cast<std::size_t>(order.members);
  incoming_.resize(hops);
  arrivals_.resize(hops);
  departures_.resize(hops);
  std::vector<std::int64_t> arriving(hops);  // tokens
  for (int hop = 1; hop < order.members; ++hop) {
    const auto h = static_cast<std::size_t>(hop);
    incoming_[h] = traffic.messages(me, hop);
    arrivals_[h] = traffic.arrivals(me, hop);
    if (!arrivals_[h].empty()) {
      arriving[h] = arrivals_[h].back().token + arrivals_[h].back().piece.columns.count;
    }
    // Only these members can get something from this one: its neighbours in both directions, the
    // one that gets its own columns, and the one that gets columns that have entered its row.
    std::array receivers{order.receiver(me, 1), order.receiver(me, order.inner),
                         order.receiver(me, hop), order.receiver(me, hop % order.inner)};
    std::sort(receivers.begin(), receivers.end());
    const auto* const end = std::unique(receivers.begin(), receivers.end());
    for (const auto* next = receivers.begin(); next != end; ++next) {
      const int receiver = *next;
      if (receiver == me || !traffic.may_send(me, receiver, hop)) continue;
      for (const RingMessage& message : traffic.messages(receiver, hop)) {
        if (message.source != me) continue;
        departures_[h].push_back({receiver, message});
        if (message.origin == me) sent_own_ = hull(sent_own_, message.columns);
      }
    }
  }
  at_once_ = std::accumulate(arriving.begin(), arriving.end(), std::int64_t{0}) * token_bytes_ <=
             context.input.options.prefetch_bytes;
  for (std::size_t hop = 0; hop < arriving.size(); ++hop) {
    const std::size_t slot = slot_of(static_cast<int>(hop));
    if (tokens_.size() <= slot) tokens_.resize(slot + 1);
    tokens_[slot] = std::max(tokens_[slot], arriving[hop]);
  }
  receive_.resize(tokens_.size(), -1);
}

// Two buffers alternate, so columns to be forwarded in the next hop are in the other one. Columns
// that have entered a row are passed on until the next round has begun, so they have two buffers of
// their own.
std::size_t RingRounds::slot_of(int hop) const {
  const RingOrder& order = traffic_.order();
  if (at_once_) return static_cast<std::size_t>(hop);
  if (order.inner == order.members || !order.enters_row(hop)) {
    return static_cast<std::size_t>(hop % order.inner % 2);
  }
  return static_cast<std::size_t>(2 + hop / order.inner % 2);
}

// Columns that enter a row are first used in the next round, and may come over a slower link than
// columns that go round the row. They come in parts during the hops of the previous round, so that
// neither link waits for the other.
std::vector<RingRounds::Part> RingRounds::parts_of(int hop, const RingMessage& message) const {
  const int inner = traffic_.order().inner;
  if (inner == 1 || !traffic_.order().enters_row(hop)) return {{hop - 1, message}};
  const std::int64_t count = std::clamp<std::int64_t>(
      message.columns.count * token_bytes_ / kLeastPartBytes, 1, inner - 1);
  std::vector<Part> parts;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = message.columns.count * i / count;
    const std::int64_t end = message.columns.count * (i + 1) / count;
    RingMessage part = message;
    part.columns = {message.columns.begin + begin, end - begin};
    part.token += begin;
    parts.push_back({hop - inner + static_cast<int>(i), part});
  }
  return parts;
}

void RingRounds::add(int first_step, const RingShare& share, const Compute& compute) {
  const bool packs = share.sent_from < 0 && sent_own_.count > 0;
  const int packed = packs ? builder_.add_packed(sent_own_, share.kv_heads) : share.sent_from;
  for (std::size_t slot = 0; slot < tokens_.size(); ++slot) {
    if (tokens_[slot] == 0) continue;
    receive_[slot] =
        builder_.add_key_value({LocalPosition(0), tokens_[slot]}, share.kv_heads, receive_[slot]);
  }
  compute(first_step, 0, share.columns);
  for (int hop = 1; hop < steps(); ++hop) {
    const int buffer = buffer_of(hop);
    for (const RingMessage& whole : incoming_[static_cast<std::size_t>(hop)]) {
      for (const auto& [posted, message] : parts_of(hop, whole)) {
        builder_.receive(first_step + posted, group_rank_(message.source),
                         group_rank_(message.origin), buffer,
                         {LocalPosition(message.token), message.columns.count});
      }
    }
    for (const auto& [receiver, whole] : departures_[static_cast<std::size_t>(hop)]) {
      for (const auto& [posted, message] : parts_of(hop, whole)) {
        const bool own = message.held_since == 0;
        builder_.send(
            first_step + posted, group_rank_(receiver), group_rank_(message.origin),
            own ? packed : buffer_of(message.held_since),
            own ? message.columns : traffic_.tokens_of(me_, message.held_since, message.columns));
      }
    }
    compute(first_step + hop, hop, {buffer, buffer, arrivals_[static_cast<std::size_t>(hop)]});
  }
}

}  // namespace annulus::ring
