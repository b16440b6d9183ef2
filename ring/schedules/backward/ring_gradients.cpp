#include "schedules/backward/ring_gradients.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace annulus::ring {
namespace {

constexpr int kGradientTurn = 1;  // after keys and values

std::int64_t size_of_runs(const std::vector<LocalRange>& runs) {
  std::int64_t size = 0;
  for (const LocalRange& run : runs) size += run.count;
  return size;
}

// The token of a column among runs that are placed side by side; nothing if no run holds it.
std::optional<LocalPosition> token_of(const std::vector<LocalRange>& runs, LocalPosition column) {
  std::int64_t token = 0;
  for (const LocalRange& run : runs) {
    if (run.begin <= column && column < run.end()) {
      return LocalPosition(token + (column - run.begin));
    }
    token += run.count;
  }
  return std::nullopt;
}

// The runs of two lists, cut where either begins or ends.
std::vector<LocalRange> cut(const std::vector<LocalRange>& a, const std::vector<LocalRange>& b) {
  std::vector<LocalPosition> edges;
  for (const auto* runs : {&a, &b}) {
    for (const LocalRange& run : *runs) {
      edges.push_back(run.begin);
      edges.push_back(run.end());
    }
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  std::vector<LocalRange> pieces;
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
    const LocalRange piece{edges[i], edges[i + 1] - edges[i]};
    if (token_of(a, piece.begin) || token_of(b, piece.begin)) pieces.push_back(piece);
  }
  return pieces;
}

}  // namespace

RingGradients::RingGradients(const RankContext& context, BackwardBuilder& builder,
                             const KvNeeds& needs, RingOrder order, int me,
                             std::function<int(int member)> group_rank, HeadRange kv_heads)
    : builder_(builder),
      needs_(needs),
      order_(order),
      me_(me),
      group_rank_(std::move(group_rank)),
      kv_heads_(kv_heads),
      sends_columns_directly_(sends_directly(context, order, group_rank_)),
      direct_(order.inner == order.members &&
              (sends_columns_directly_ || builder.wire_dtype() != builder.gradient_dtype())),
      traffic_(needs, order, sends_columns_directly_),
      rounds_(context, builder, traffic_, me, group_rank_, kv_heads.count) {}

void RingGradients::add(int first_step, const RingShare& share, const ColumnGradients& own,
                        const Compute& compute) {
  first_step_ = first_step;
  rounds_.add(first_step, share, [&](int step, int hop, const PlacedColumns& columns) {
    if (hop == 0) return compute(step, columns, own);
    compute_hop(step, hop, columns, compute);
  });
  bring_home(own);
}

// The columns of `origin` that `member` needs, as runs of the owner's columns.
std::vector<LocalRange> RingGradients::needed(int origin, int member) const {
  return annulus::ring::runs_of(needs_.of(member, origin));
}
std::vector<LocalRange> RingGradients::needed_in(int origin, int hop) const {
  return needed(origin, order_.receiver(origin, hop));
}

// The last hop before `hop` in which a member needs columns of `origin`; 0 if there is none.
int RingGradients::needed_before(int origin, int hop) const {
  while (--hop > 0 && needed_in(origin, hop).empty()) {
  }
  return hop;
}
// The next hop after `hop`; 0 if there is none, so that the sum goes home.
int RingGradients::needed_after(int origin, int hop) const {
  while (++hop < order_.members) {
    if (!needed_in(origin, hop).empty()) return hop;
  }
  return 0;
}
// The columns that the sum covers after a hop: it has passed some rows of members as a whole, and a
// part of one row. It begins after its owner.
std::vector<LocalRange> RingGradients::summed(int origin, int hop) const {
  const int inner = order_.inner;
  const int rows = order_.members / inner;
  const int whole_rows = hop / inner;
  std::vector<LocalRange> runs;
  // The members of a row, from a place on.
  const auto add = [&](int turn, int place, int count) {
    const int first = (origin / inner + turn) % rows * inner;
    const int begin = (origin + place) % inner;
    const int until_end = std::min(count, inner - begin);
    needs_.add_of_any(runs, origin, first + begin, until_end);
    needs_.add_of_any(runs, origin, first, count - until_end);
  };
  for (int turn = 0; turn < whole_rows; ++turn) {
    const int own = turn == 0 ? 1 : 0;
    add(turn, own, inner - own);
  }
  const int own = whole_rows == 0 ? 1 : 0;
  add(whole_rows, own, hop % inner + 1 - own);
  return runs;
}

// The older of the last two buffers of a role. The next one takes over its memory.
int& RingGradients::last_of(Role role) {
  std::array<int, kSlots>& slots = buffers_.try_emplace(role, std::array{-1, -1}).first->second;
  return slots[used_[role]++ % kSlots];
}

int RingGradients::add_buffer(Role role, std::int64_t tokens) {
  int& last = last_of(role);
  last = builder_.add_column_gradients({LocalPosition(0), tokens}, kv_heads_, last).key;
  return last;
}

int RingGradients::fresh(std::int64_t tokens) {
  return builder_.add_column_gradients({LocalPosition(0), tokens}, kv_heads_).key;
}

void RingGradients::compute_hop(int step, int hop, const PlacedColumns& columns,
                                const Compute& compute) {
  const int origin = order_.origin(me_, hop);
  const std::vector<LocalRange> mine = needed(origin, me_);
  if (mine.empty()) return;
  const int part = add_buffer(Role::part, size_of_runs(mine));
  compute(step, columns, {part, part});
  if (direct_) {
    int& last = last_of(Role::wire);
    const int sent = builder_.for_wire(step, part, last);
    if (sent != part) last = sent;
    return send(step + 1, origin, origin, sent);
  }
  const int before = needed_before(origin, hop);
  const int sum = before == 0 ? part : add_up(step, origin, before, hop, part, mine);
  const int after = needed_after(origin, hop);
  send(step + 1, after == 0 ? origin : order_.receiver(origin, after), origin, sum);
}

void RingGradients::send(int step, int member, int origin, int buffer) {
  builder_.send({step, kGradientTurn}, group_rank_(member), group_rank_(origin), buffer,
                builder_.plan().buffer(buffer).tokens);
}
void RingGradients::receive(int step, int member, int origin, int buffer) {
  builder_.receive({step, kGradientTurn}, group_rank_(member), group_rank_(origin), buffer,
                   builder_.plan().buffer(buffer).tokens);
}

// Receives the sum of the hops up to `before`, and adds the rank's part. Returns the buffer of
// the new sum.
int RingGradients::add_up(int step, int origin, int before, int hop, int part,
                          const std::vector<LocalRange>& mine) {
  const std::vector<LocalRange> theirs = summed(origin, before);
  std::vector<LocalRange> both = theirs;
  join(both, mine);
  // A sum that skips ranks arrives early, when the memory of its turn may still be in use.
  const int received = before == hop - 1 ? add_buffer(Role::received, size_of_runs(theirs))
                                         : fresh(size_of_runs(theirs));
  receive(first_step_ + before + 1, order_.receiver(origin, before), origin, received);
  const int sum = both == theirs ? received : add_buffer(Role::sum, size_of_runs(both));
  std::int64_t token = 0;
  for (const LocalRange& run : cut(theirs, mine)) {
    const auto region = [&](int buffer, LocalPosition at) {
      return builder_.whole(buffer).at({at, run.count});
    };
    std::vector<Region> parts;
    if (const auto at = token_of(theirs, run.begin)) parts.push_back(region(received, *at));
    if (const auto at = token_of(mine, run.begin)) parts.push_back(region(part, *at));
    const Region into = region(sum, LocalPosition(token));
    token += run.count;
    if (!(parts.size() == 1 && parts.front() == into)) {
      builder_.sum(step, std::move(parts), into);
    }
  }
  return sum;
}

// Receives the gradients of the member's own columns: one part for every hop, or their sum.
void RingGradients::bring_home(const ColumnGradients& own) {
  if (direct_) {
    for (int hop = 1; hop < order_.members; ++hop) take_home(hop, needed_in(me_, hop), own);
  } else if (const int last = needed_before(me_, order_.members); last > 0) {
    take_home(last, summed(me_, last), own);
  }
}

void RingGradients::take_home(int hop, const std::vector<LocalRange>& runs,
                              const ColumnGradients& own) {
  if (runs.empty()) return;
  int& received = last_of(Role::home);
  const LocalRange tokens{LocalPosition(0), size_of_runs(runs)};
  received = direct_ ? builder_.add_wire_gradients(tokens, kv_heads_, received)
                     : builder_.add_column_gradients(tokens, kv_heads_, received).key;
  const int step = first_step_ + hop + 1;
  receive(step, order_.receiver(me_, hop), me_, received);
  builder_.add_columns(step, received, runs, own);
}

}  // namespace annulus::ring
