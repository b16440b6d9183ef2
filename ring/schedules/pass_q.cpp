#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "schedules/plan_builder.hpp"
#include "schedules/schedules.hpp"

// Keys and values stay where they are. Every rank computes all rows of its group against its own
// columns, and what comes of it is combined: for few queries against a long cache.
namespace annulus::ring {
namespace {

class PassQ {
 public:
  explicit PassQ(const RankContext& context)
      : context_(context),
        ranks_(static_cast<int>(context.group.size())),
        me_(context.group_rank),
        builder_(context),
        heads_{0, builder_.plan().local.heads},
        rows_{LocalPosition(0), builder_.plan().local.query_length} {}

  // All ranks have the same rows: partial results are exchanged in pairs, with a partner twice as
  // far away every time, so that after log P steps all have the same sum. Both of a pair combine in
  // order of rank, so all get the same bits. Ranks beyond a power of two hand theirs over before,
  // and get the sum in the end.
  RankPlan plan_replicated() {
    Result state = partial();
    const int rows = builder_.add_rows(PlanBuilder::kQuery, positions(context_.rank), state, false);
    builder_.compute(0, rows, heads_, builder_.own_columns());
    builder_.complete(0, rows, heads_);
    if (rows_.count * heads_.count * builder_.plan().local.batch == 0) return builder_.finish();

    int paired = 1;
    while (2 * paired <= ranks_) paired *= 2;
    const int rest = ranks_ - paired;
    int step = 1;
    if (me_ >= paired) {
      send(step, me_ - paired, state);
    } else if (me_ < rest) {
      state = combined(step, {state, received(step, me_ + paired)});
    }
    for (int distance = 1; distance < paired && me_ < paired; distance *= 2) {
      const int partner = me_ ^ distance;
      ++step;
      send(step, partner, state);
      const Result theirs = received(step, partner);
      const bool last = 2 * distance == paired && rest == 0;
      const std::vector<Result> parts =
          me_ < partner ? std::vector{state, theirs} : std::vector{theirs, state};
      if (last) {
        builder_.reduce(step, parts, builder_.own_results(heads_), true);
        return builder_.finish();
      }
      state = combined(step, parts);
    }
    // After as many steps on every rank, so that messages match in order.
    ++step;
    if (me_ < rest) send(step, me_ + paired, state);
    if (me_ >= paired) state = received(step, me_ - paired);
    builder_.reduce(step, {state}, builder_.own_results(heads_), true);
    return builder_.finish();
  }

  // Every rank has rows of its own: these go round, and partial results straight back.
  RankPlan plan_sharded() {
    const auto distance_to = [&](int hops) { return (me_ + hops) % ranks_; };
    const auto distance_from = [&](int hops) { return (me_ + ranks_ - hops) % ranks_; };
    const bool any = rows_.count * heads_.count * builder_.plan().local.batch > 0;

    std::vector<Result> parts{partial()};
    const int own =
        builder_.add_rows(PlanBuilder::kQuery, positions(context_.rank), parts.front(), false);
    builder_.compute(0, own, heads_, builder_.own_columns());
    builder_.complete(0, own, heads_);
    int packed = -1;
    if (any && ranks_ > 1) {
      packed = builder_.add_exchange({Content::query}, context_.input.problem.dtype, rows_, heads_);
      builder_.copy(0, Content::query, PlanBuilder::kQuery, rows_.begin, packed, rows_, heads_);
    }
    std::map<int, int> buffers;     // of queries, by turn
    std::map<int, Result> targets;  // of their results, by turn
    for (int hop = 1; hop < ranks_; ++hop) {
      const int to = distance_to(hop);
      const int from = distance_from(hop);
      const int turn = hop % 2;
      if (any && sees(me_, to)) {
        builder_.send(hop - 1, to, me_, packed, rows_);
        const Result part = partial();
        builder_.receive(hop + 1, to, me_, part, rows_);
        parts.push_back(part);
      }
      if (!sees(from, me_) || heads_.count == 0) continue;
      const PositionRanges theirs = positions(context_.group[static_cast<std::size_t>(from)]);
      const LocalRange tokens{LocalPosition(0), theirs.size()};
      int& queries = buffers.try_emplace(turn, -1).first->second;
      queries = builder_.add_exchange({Content::query}, context_.input.problem.dtype, tokens,
                                      heads_, queries);
      builder_.receive(hop - 1, from, from, queries, tokens);
      const auto known = targets.find(turn);
      const Result target = builder_.add_partial_results(
          tokens, heads_, known == targets.end() ? nullptr : &known->second);
      targets.insert_or_assign(turn, target);
      const int rows = builder_.add_rows(queries, theirs, target, false);
      builder_.compute(hop, rows, heads_, builder_.own_columns());
      builder_.complete(hop, rows, heads_);
      builder_.send(hop + 1, from, from, target, tokens);
    }
    // As many at once as a reduction takes.
    const int last = ranks_ + 1;
    const auto most = static_cast<std::size_t>(most_parts(context_.input.problem));
    while (parts.size() > most) {
      const std::vector<Result> first(parts.begin(), parts.begin() + static_cast<long>(most));
      parts.erase(parts.begin(), parts.begin() + static_cast<long>(most));
      parts.insert(parts.begin(), combined(last, first));
    }
    builder_.reduce(last, parts, builder_.own_results(heads_), true);
    return builder_.finish();
  }

 private:
  [[nodiscard]] PositionRanges positions(int rank) const {
    return context_.input.operands.query.positions(rank, 1);
  }
  // Whether rows of one rank of the group see columns of another.
  [[nodiscard]] bool sees(int rank, int other) const {
    return !context_.needs.of(rank, other).empty();
  }
  [[nodiscard]] Result partial() { return builder_.add_partial_results(rows_, heads_); }
  void send(int step, int peer, const Result& state) {
    builder_.send(step, peer, me_, state, rows_);
  }
  [[nodiscard]] Result received(int step, int peer) {
    const Result state = partial();
    builder_.receive(step, peer, peer, state, rows_);
    return state;
  }
  [[nodiscard]] Result combined(int step, const std::vector<Result>& parts) {
    const Result sum = partial();
    builder_.reduce(step, parts, sum, false);
    return sum;
  }

  const RankContext& context_;
  int ranks_;
  int me_;
  PlanBuilder builder_;
  HeadRange heads_;
  LocalRange rows_;
};

}  // namespace

RankPlan plan_pass_q(const RankContext& context) {
  if (context.group.size() == 1) return plan_local(context);
  PassQ plan(context);
  return has_replicated_rows(context.input) ? plan.plan_replicated() : plan.plan_sharded();
}

}  // namespace annulus::ring
