#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "schedules/building/gathering.hpp"
#include "schedules/building/passed_rows.hpp"
#include "schedules/building/plan_builder.hpp"
#include "schedules/schedules.hpp"

// Keys and values stay where they are. Every rank computes all rows of its group against its own
// columns, and the results are combined: for few queries against a long cache. Rows of a bias or a
// dense mask go with the queries' rows, cut to the columns of the rank that gets them.
namespace annulus::ring {
namespace {

class PassQ {
 public:
  explicit PassQ(const RankContext& context)
      : context_(context),
        ranks_(static_cast<int>(context.group.size())),
        me_(context.group_rank),
        builder_(context),
        passed_(builder_, true),
        with_rows_(passed_.contents()),
        heads_{0, builder_.plan().local.heads},
        rows_{LocalPosition(0), builder_.plan().local.query_length} {}

  // All ranks have the same rows, and get the same bits: parts are combined in order of rank.
  RankPlan plan_replicated() {
    const Result state = partial();
    const int rows = builder_.add_rows(builder_.own_rows(), positions(context_.rank), state, false);
    builder_.compute(0, rows, heads_, builder_.own_columns());
    builder_.complete(0, rows, heads_);
    const std::int64_t bytes =
        rows_.count * builder_.plan().token_bytes(builder_.plan().buffer(state.output.buffer));
    if (bytes == 0) return builder_.finish();
    if (ranks_ <= kMaximumAtOnce && bytes * (ranks_ - 1) <= kSmallBytes) {
      combine_at_once(state);
    } else {
      combine_in_pairs(state);
    }
    return builder_.finish();
  }

  // Every rank has rows of its own. If they are few, all ranks get all of them, so that each kernel
  // reads the columns once.
  RankPlan plan_sharded() {
    const Gathering gathering = gathering_of(context_, context_.group, &HeldSequence::rows);
    const AttentionShape& local = builder_.plan().local;
    std::int64_t row_bytes =
        local.batch * local.heads * local.value_dim * static_cast<std::int64_t>(sizeof(float));
    for (const Content content : with_rows_) {
      if (content == Content::query) continue;
      const RankPlan& plan = builder_.plan();
      row_bytes += plan.token_bytes(plan.buffer(plan.caller_buffer(content))) / ranks_;
    }
    const std::int64_t bytes = gathering.size() * row_bytes;
    return bytes <= kSmallBytes ? plan_gathered(gathering) : plan_round();
  }

 private:
  RankPlan plan_gathered(const Gathering& gathering) {
    const LocalRange all = gathering.all();
    RowBuffers gathered = passed_.gathered_scores(0, gathering);
    gathered.query = passed_.add_of_others(Content::query, all);
    builder_.gather(0, gathered.query, gathering);
    const Result computed = builder_.add_partial_results(all, heads_);
    const int rows = builder_.add_rows(gathered, gathering.positions(), computed, false);
    builder_.compute(1, rows, heads_, builder_.own_columns());
    builder_.complete(1, rows, heads_);

    std::vector<Result> parts(static_cast<std::size_t>(ranks_));
    const auto part_of = [&](int rank) -> Result& { return parts[static_cast<std::size_t>(rank)]; };
    part_of(me_) = partial();
    for (const Gathering::Message& message : gathering.messages(me_)) {
      builder_.copy(2, computed, message.placed().begin, part_of(me_), message.tokens);
    }
    builder_.each_turn([&](int to, int from) {
      part_of(from) = partial();
      builder_.send(2, to, to, computed, gathering.placed(to));
      builder_.receive(2, from, me_, part_of(from), gathering.tokens(me_));
    });
    combine(2, std::move(parts));
    return builder_.finish();
  }

  // Combines as many parts at once as a reduction takes.
  void combine(int step, std::vector<Result> parts) {
    const auto most = static_cast<std::size_t>(most_parts(context_.input.problem));
    while (parts.size() > most) {
      const std::vector<Result> first(parts.begin(), parts.begin() + static_cast<long>(most));
      parts.erase(parts.begin(), parts.begin() + static_cast<long>(most));
      parts.insert(parts.begin(), combined(step, first));
    }
    builder_.reduce(step, parts, builder_.own_results(heads_), true);
  }

  // Rows go round, and partial results go straight back.
  RankPlan plan_round() {
    const bool any = rows_.count * heads_.count * builder_.plan().local.batch > 0;

    Parts parts{{partial()}, {}};
    const int own =
        builder_.add_rows(builder_.own_rows(), positions(context_.rank), parts.held.front(), false);
    builder_.compute(0, own, heads_, builder_.own_columns());
    builder_.complete(0, own, heads_);
    const int queries = any ? passed_.pack(0, Content::query, me_) : -1;
    const RowBuffers common = passed_.for_all();
    std::array<RowBuffers, 2> packed;                   // by turn
    std::array<RowBuffers, 2> arrived{common, common};  // others' rows, by turn
    std::array<std::optional<Result>, 2> targets;       // results of these rows, by turn
    for (int hop = 1; hop < ranks_; ++hop) {
      const int to = (me_ + hop) % ranks_;
      const int from = (me_ + ranks_ - hop) % ranks_;
      const auto turn = static_cast<std::size_t>(hop % 2);
      if (any && context_.needs.sees(me_, to)) {
        for (const Content content : with_rows_) {
          int& sent = packed[turn][content];
          sent = content == Content::query ? queries : passed_.pack(hop - 1, content, to, sent);
          builder_.send(hop - 1, to, me_, sent, rows_);
        }
        const Result part = take_partial(parts);
        builder_.receive(hop + 1, to, me_, part, {rows_});
        parts.held.push_back(part);
        make_room(hop, parts);
      }
      if (!context_.needs.sees(from, me_) || heads_.count == 0) continue;
      const PositionRanges theirs = positions(context_.group[static_cast<std::size_t>(from)]);
      const LocalRange tokens{LocalPosition(0), theirs.size()};
      for (const Content content : with_rows_) {
        int& rows = arrived[turn][content];
        rows = passed_.add_of_others(content, tokens, rows);
        builder_.receive(hop - 1, from, from, rows, tokens);
      }
      std::optional<Result>& target = targets[turn];
      target = builder_.add_partial_results(tokens, heads_, target ? &*target : nullptr);
      const int rows = builder_.add_rows(arrived[turn], theirs, *target, false);
      builder_.compute(hop, rows, heads_, builder_.own_columns());
      builder_.complete(hop, rows, heads_);
      builder_.send(hop + 1, from, from, *target, {tokens});
    }
    combine(ranks_ + 1, std::move(parts.held));
    return builder_.finish();
  }

  // Partial results of the rank's own rows, and the memory of combined ones.
  struct Parts {
    std::vector<Result> held, spare;
  };

  [[nodiscard]] Result take_partial(Parts& parts) {
    if (parts.spare.empty()) return partial();
    const Result memory = parts.spare.back();
    parts.spare.pop_back();
    return partial(&memory);
  }

  // Combines the first parts if more would not fit in PlanOptions::result_bytes. There are five
  // further results of this size: the sum; two parts that are still on their way, so that computing
  // does not wait for them; and the results of two other ranks' rows.
  void make_room(int step, Parts& parts) {
    const AttentionProblem& problem = context_.input.problem;
    const std::int64_t bytes = rows_.count * heads_.count * builder_.plan().local.batch *
                               builder_.plan().local.value_dim *
                               static_cast<std::int64_t>(size_of(partial_dtype(problem.dtype)));
    const std::int64_t fit = context_.input.options.result_bytes / std::max<std::int64_t>(bytes, 1);
    const auto most =
        static_cast<std::size_t>(std::clamp<std::int64_t>(fit - 5, 2, most_parts(problem)));
    if (parts.held.size() < most + 2) return;
    const auto rest = parts.held.begin() + static_cast<long>(most);
    const std::vector<Result> first(parts.held.begin(), rest);
    parts.held.erase(parts.held.begin(), rest);
    const Result sum = take_partial(parts);
    builder_.reduce(step, first, sum, false);
    parts.held.insert(parts.held.begin(), sum);
    parts.spare.insert(parts.spare.end(), first.begin(), first.end());
  }

  // Small states go to all ranks in one exchange: the time is that of its latency.
  static constexpr int kMaximumAtOnce = 8;
  static constexpr std::int64_t kSmallBytes = std::int64_t{4} << 20;

  void combine_at_once(const Result& state) {
    std::vector<Result> parts(static_cast<std::size_t>(ranks_), state);
    builder_.each_turn([&](int to, int from) {
      send(1, to, state);
      parts[static_cast<std::size_t>(from)] = received(1, from);
    });
    builder_.reduce(1, parts, builder_.own_results(heads_), true);
  }

  // The distance to the partner doubles in each step, so that after log P steps all ranks have the
  // same sum. Ranks beyond a power of two hand over their states first and get the sum at the end.
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
  [[nodiscard]] Result partial(const Result* reuses = nullptr) {
    return builder_.add_partial_results(rows_, heads_, reuses);
  }
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
  PassedRows passed_;
  std::vector<Content> with_rows_;
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
