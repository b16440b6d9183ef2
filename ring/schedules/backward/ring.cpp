#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "schedules/backward/backward_builder.hpp"
#include "schedules/ring_rounds.hpp"
#include "schedules/schedules.hpp"

// Keys and values go round as in the forward pass. The gradients of a rank's columns follow in
// float32, and the exchanges of a step bring keys and values first, so that gradients do not delay
// them. They come home in one of two ways. Directly, every rank sends its part to the owner, who
// adds the parts in the order of the hops. Otherwise the sum travels one hop behind the columns,
// past the ranks that compute any of them, and the last of these sends it home. In a double ring it
// always travels behind: it then holds the sum of a whole row when it crosses to the next one.
namespace annulus::ring {
namespace {

constexpr int kGradientTurn = 1;  // after keys and values
constexpr std::size_t kSlots = 2;

// Sorted runs that hold all of both lists.
std::vector<LocalRange> joined_runs(std::vector<LocalRange> runs,
                                    const std::vector<LocalRange>& more) {
  runs.insert(runs.end(), more.begin(), more.end());
  std::sort(runs.begin(), runs.end(),
            [](const LocalRange& a, const LocalRange& b) { return a.begin < b.begin; });
  std::vector<LocalRange> result;
  for (const LocalRange& run : runs) {
    if (result.empty() || result.back().end() < run.begin) {
      result.push_back(run);
    } else {
      result.back() = hull(result.back(), run);
    }
  }
  return result;
}

std::int64_t size_of_runs(const std::vector<LocalRange>& runs) {
  std::int64_t size = 0;
  for (const LocalRange& run : runs) size += run.count;
  return size;
}

// Where columns lie among runs that are placed side by side; none if they are not there.
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

class RingBackward {
 public:
  RingBackward(const RankContext& context, int inner)
      : needs_(context.needs),
        me_(context.group_rank),
        builder_(context),
        order_{context.needs.size(), inner},
        sends_columns_directly_(sends_directly(context, order_, [](int member) { return member; })),
        direct_(sends_columns_directly_ && inner == order_.members),
        traffic_(context.needs, order_, sends_columns_directly_),
        rounds_(
            context, builder_, traffic_, me_, [](int member) { return member; }, kv_heads().count) {
  }

  RankPlan plan() {
    rounds_.add(
        0, {kv_heads(), builder_.own_columns()},
        [this](int step, int hop, const PlacedColumns& columns) { compute(step, hop, columns); });
    bring_home();
    const int last = order_.members;
    builder_.finish_rows(last);
    builder_.finish_columns(last);
    return builder_.finish();
  }

 private:
  [[nodiscard]] HeadRange kv_heads() const { return {0, builder_.plan().local.kv_heads}; }
  [[nodiscard]] HeadRange heads() const { return {0, builder_.plan().local.heads}; }

  // The columns of `origin` that it needs, as runs of the owner's columns.
  [[nodiscard]] std::vector<LocalRange> needed(int origin, int member) const {
    return annulus::ring::runs_of(needs_.of(member, origin));
  }
  [[nodiscard]] std::vector<LocalRange> needed_in(int origin, int hop) const {
    return needed(origin, order_.receiver(origin, hop));
  }

  // The last hop before `hop` in which a rank needs columns of `origin`; 0 if there is none.
  [[nodiscard]] int needed_before(int origin, int hop) const {
    while (--hop > 0 && needed_in(origin, hop).empty()) {
    }
    return hop;
  }
  // The next one; 0 if there is none: the sum goes home.
  [[nodiscard]] int needed_after(int origin, int hop) const {
    while (++hop < order_.members) {
      if (!needed_in(origin, hop).empty()) return hop;
    }
    return 0;
  }
  // The columns that the sum covers after a hop.
  [[nodiscard]] std::vector<LocalRange> summed(int origin, int hop) const {
    std::vector<LocalRange> runs;
    for (int h = 1; h <= hop; ++h) runs = joined_runs(std::move(runs), needed_in(origin, h));
    return runs;
  }

  enum class Role : std::uint8_t { part, received, sum, home };
  // A buffer for gradients, in the memory of the last but one of the same role.
  int add(Role role, std::int64_t tokens) {
    std::array<int, kSlots>& slots = buffers_.try_emplace(role, std::array{-1, -1}).first->second;
    int& last = slots[used_[role]++ % kSlots];
    last = builder_.add_column_gradients({LocalPosition(0), tokens}, kv_heads(), last).key;
    return last;
  }

  int fresh(std::int64_t tokens) {
    return builder_.add_column_gradients({LocalPosition(0), tokens}, kv_heads()).key;
  }

  void compute(int step, int hop, const PlacedColumns& columns) {
    if (hop == 0) {
      builder_.compute(step, BackwardBuilder::kOwnRows, heads(), columns,
                       builder_.own_columns_gradients());
      return;
    }
    const int origin = order_.origin(me_, hop);
    const std::vector<LocalRange> mine = needed(origin, me_);
    if (mine.empty()) return;
    const int part = add(Role::part, size_of_runs(mine));
    builder_.compute(step, BackwardBuilder::kOwnRows, heads(), columns, {part, part});
    if (direct_) return send(step + 1, origin, origin, part);
    const int before = needed_before(origin, hop);
    const int sum = before == 0 ? part : add_up(step, origin, before, hop, part, mine);
    const int after = needed_after(origin, hop);
    send(step + 1, after == 0 ? origin : order_.receiver(origin, after), origin, sum);
  }

  void send(int step, int peer, int origin, int buffer) {
    builder_.send({step, kGradientTurn}, peer, origin, buffer,
                  builder_.plan().buffer(buffer).tokens);
  }
  void receive(int step, int peer, int origin, int buffer) {
    builder_.receive({step, kGradientTurn}, peer, origin, buffer,
                     builder_.plan().buffer(buffer).tokens);
  }

  // Receives the sum of the hops up to `before`, and adds the rank's part. Returns the buffer of
  // the new sum.
  int add_up(int step, int origin, int before, int hop, int part,
             const std::vector<LocalRange>& mine) {
    const std::vector<LocalRange> theirs = summed(origin, before);
    const std::vector<LocalRange> both = joined_runs(theirs, mine);
    // A sum that skips ranks comes before the rank's turn, and memory in turns may still be in use.
    const int received =
        before == hop - 1 ? add(Role::received, size_of_runs(theirs)) : fresh(size_of_runs(theirs));
    receive(before + 1, order_.receiver(origin, before), origin, received);
    const int sum = both == theirs ? received : add(Role::sum, size_of_runs(both));
    std::int64_t token = 0;
    for (const LocalRange& run : cut(theirs, mine)) {
      const auto region = [&](int buffer, LocalPosition at) {
        Region found = builder_.whole(buffer);
        found.tokens = {at, run.count};
        return found;
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

  // The runs of two lists, cut where either begins or ends.
  static std::vector<LocalRange> cut(const std::vector<LocalRange>& a,
                                     const std::vector<LocalRange>& b) {
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

  // The gradients of the rank's own columns: of every hop, or their sum.
  void bring_home() {
    if (direct_) {
      for (int hop = 1; hop < order_.members; ++hop) take_home(hop, needed_in(me_, hop));
    } else if (const int last = needed_before(me_, order_.members); last > 0) {
      take_home(last, summed(me_, last));
    }
  }
  void take_home(int hop, const std::vector<LocalRange>& runs) {
    if (runs.empty()) return;
    const int received = add(Role::home, size_of_runs(runs));
    receive(hop + 1, order_.receiver(me_, hop), me_, received);
    builder_.add_to_own_columns(hop + 1, received, runs);
  }

  const KvNeeds& needs_;
  int me_;
  BackwardBuilder builder_;
  RingOrder order_;
  bool sends_columns_directly_;
  bool direct_;  // gradients
  RingTraffic traffic_;
  RingRounds rounds_;
  std::map<Role, std::array<int, kSlots>> buffers_;  // the last ones
  std::map<Role, std::size_t> used_;
};

RankPlan plan_rings(const RankContext& context, int inner) {
  if (context.group.size() == 1 || has_replicated_rows(context.input)) {
    return plan_local_backward(context);
  }
  return RingBackward(context, inner).plan();
}

}  // namespace

RankPlan plan_ring_backward(const RankContext& context) {
  return plan_rings(context, context.needs.size());
}

RankPlan plan_double_ring_backward(const RankContext& context) {
  return plan_rings(context, inner_size(context.input));
}

}  // namespace annulus::ring
