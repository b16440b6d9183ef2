#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "schedules/gathering.hpp"
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

  // All ranks have the same rows, and get the same bits: parts are combined in order of rank.
  RankPlan plan_replicated() {
    const Result state = partial();
    const int rows = builder_.add_rows(PlanBuilder::kQuery, positions(context_.rank), state, false);
    builder_.compute(0, rows, heads_, builder_.own_columns());
    builder_.complete(0, rows, heads_);
    const std::int64_t bytes =
        rows_.count * builder_.plan().token_bytes(builder_.plan().buffer(state.output.buffer));
    if (bytes == 0) return builder_.finish();
    if (ranks_ <= kMostAtOnce && bytes * (ranks_ - 1) <= kSmallBytes) {
      combine_at_once(state);
    } else {
      combine_in_pairs(state);
    }
    return builder_.finish();
  }

  // Every rank has rows of its own. If they are few, all ranks get all of them, so that each kernel
  // reads the columns once.
  RankPlan plan_sharded() {
    std::vector<PositionRanges> shards;
    for (const int rank : context_.group) shards.push_back(positions(rank));
    const Gathering gathering(shards);
    const AttentionShape& local = builder_.plan().local;
    const std::int64_t bytes = gathering.size() * local.batch * local.heads * local.value_dim *
                               static_cast<std::int64_t>(sizeof(float));
    return bytes <= kSmallBytes ? plan_gathered(gathering) : plan_round();
  }

 private:
  RankPlan plan_gathered(const Gathering& gathering) {
    const DType dtype = context_.input.problem.dtype;
    const LocalRange all{LocalPosition(0), gathering.size()};
    const int queries = builder_.add_exchange({Content::query}, dtype, all, heads_);
    for (const Gathering::Message& message : gathering.messages(me_)) {
      builder_.copy(0, Content::query, PlanBuilder::kQuery, message.tokens.begin, queries,
                    message.placed(), heads_);
    }
    for (int turn = 1; turn < ranks_; ++turn) {
      const int to = (me_ + turn) % ranks_;
      const int from = (me_ + ranks_ - turn) % ranks_;
      for (const Gathering::Message& message : gathering.messages(me_)) {
        builder_.send(0, to, me_, queries, message.placed());
      }
      for (const Gathering::Message& message : gathering.messages(from)) {
        builder_.receive(0, from, from, queries, message.placed());
      }
    }
    const Result computed = builder_.add_partial_results(all, heads_);
    const int rows = builder_.add_rows(queries, gathering.positions(), computed, false);
    builder_.compute(1, rows, heads_, builder_.own_columns());
    builder_.complete(1, rows, heads_);

    std::vector<Result> parts(static_cast<std::size_t>(ranks_));
    for (int turn = 0; turn < ranks_; ++turn) {
      const int to = (me_ + turn) % ranks_;
      const int from = (me_ + ranks_ - turn) % ranks_;
      Result& part = parts[static_cast<std::size_t>(from)];
      part = partial();
      if (turn == 0) {
        for (const Gathering::Message& message : gathering.messages(me_)) {
          builder_.copy(2, computed, message.placed().begin, part, message.tokens);
        }
        continue;
      }
      std::vector<LocalRange> runs;
      for (const Gathering::Message& message : gathering.messages(to))
        runs.push_back(message.placed());
      builder_.send(2, to, to, computed, runs);
      runs.clear();
      for (const Gathering::Message& message : gathering.messages(me_)) {
        runs.push_back(message.tokens);
      }
      builder_.receive(2, from, me_, part, runs);
    }
    combine(2, std::move(parts));
    return builder_.finish();
  }

  // As many parts at once as a reduction takes.
  void combine(int step, std::vector<Result> parts) {
    const auto most = static_cast<std::size_t>(most_parts(context_.input.problem));
    while (parts.size() > most) {
      const std::vector<Result> first(parts.begin(), parts.begin() + static_cast<long>(most));
      parts.erase(parts.begin(), parts.begin() + static_cast<long>(most));
      parts.insert(parts.begin(), combined(step, first));
    }
    builder_.reduce(step, parts, builder_.own_results(heads_), true);
  }

  // Rows go round, and partial results straight back.
  RankPlan plan_round() {
    const bool any = rows_.count * heads_.count * builder_.plan().local.batch > 0;

    std::vector<Result> parts{partial()};
    const int own =
        builder_.add_rows(PlanBuilder::kQuery, positions(context_.rank), parts.front(), false);
    builder_.compute(0, own, heads_, builder_.own_columns());
    builder_.complete(0, own, heads_);
    int packed = -1;
    if (any) {
      packed = builder_.add_exchange({Content::query}, context_.input.problem.dtype, rows_, heads_);
      builder_.copy(0, Content::query, PlanBuilder::kQuery, rows_.begin, packed, rows_, heads_);
    }
    std::map<int, int> buffers;     // of queries, by turn
    std::map<int, Result> targets;  // of their results, by turn
    for (int hop = 1; hop < ranks_; ++hop) {
      const int to = (me_ + hop) % ranks_;
      const int from = (me_ + ranks_ - hop) % ranks_;
      const int turn = hop % 2;
      if (any && sees(me_, to)) {
        builder_.send(hop - 1, to, me_, packed, rows_);
        const Result part = partial();
        builder_.receive(hop + 1, to, me_, part, {rows_});
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
      builder_.send(hop + 1, from, from, target, {tokens});
    }
    combine(ranks_ + 1, std::move(parts));
    return builder_.finish();
  }

  // Small states go to all ranks in one exchange: the time is that of its latency.
  static constexpr int kMostAtOnce = 8;
  static constexpr std::int64_t kSmallBytes = std::int64_t{4} << 20;

  void combine_at_once(const Result& state) {
    std::vector<Result> parts(static_cast<std::size_t>(ranks_), state);
    for (int turn = 1; turn < ranks_; ++turn) {
      const int from = (me_ + ranks_ - turn) % ranks_;
      send(1, (me_ + turn) % ranks_, state);
      parts[static_cast<std::size_t>(from)] = received(1, from);
    }
    builder_.reduce(1, parts, builder_.own_results(heads_), true);
  }

  // Partners are twice as far away every time, so that after log P steps all have the same sum.
  // Ranks beyond a power of two hand theirs over before, and get the sum in the end.
  void combine_in_pairs(Result state) {
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
      if (last) return builder_.reduce(step, parts, builder_.own_results(heads_), true);
      state = combined(step, parts);
    }
    ++step;
    if (me_ < rest) send(step, me_ + paired, state);
    if (me_ >= paired) state = received(step, me_ - paired);
    builder_.reduce(step, {state}, builder_.own_results(heads_), true);
  }

  [[nodiscard]] PositionRanges positions(int rank) const {
    return context_.input.operands.query.positions(rank, 1);
  }
  // Whether rows of one rank of the group see columns of another.
  [[nodiscard]] bool sees(int rank, int other) const {
    return !context_.needs.of(rank, other).empty();
  }
  [[nodiscard]] Result partial() { return builder_.add_partial_results(rows_, heads_); }
  void send(int step, int peer, const Result& state) {
    builder_.send(step, peer, me_, state, {rows_});
  }
  [[nodiscard]] Result received(int step, int peer) {
    const Result state = partial();
    builder_.receive(step, peer, peer, state, {rows_});
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
