#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// Plays a plan with the global position of every token in place of its query, key and value, and
/// with the blocks that it holds in place of every result. Tasks run in a random order, any that
/// the queues and the dependencies of the plan permit; what an exchange sends is read as late as it
/// may be.
class PlanPlayer {
 public:
  PlanPlayer(const Plan& plan, const ShardedOperands& operands, unsigned seed = 1)
      : plan_(plan), operands_(operands), random_(seed), states_(plan.ranks.size()) {
    for (const RankPlan& rank : plan.ranks) start(rank);
    match();
  }

  void play() {
    std::vector<std::size_t> order(states_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    bool moved = true;
    while (moved && !testing::Test::HasFatalFailure()) {
      moved = false;
      std::shuffle(order.begin(), order.end(), random_);
      for (const std::size_t r : order) moved = step(r) || moved;
    }
    for (std::size_t r = 0; r < states_.size(); ++r) {
      for (const auto& [queue, tasks] : states_[r].queues) {
        EXPECT_TRUE(tasks.next == tasks.tasks.size())
            << "rank " << r << " waits for ever in task " << tasks.tasks[tasks.next];
      }
    }
  }

  /// The output of every row and head holds every visible pair exactly once, no block twice, and
  /// its sinks; and it is unnormalised exactly if the problem wants that. LSE and maximum hold the
  /// same. Nothing is computed in vain.
  void expect_complete() const {
    std::set<BlockId> used;
    for (std::size_t r = 0; r < states_.size(); ++r) {
      expect_results(plan_.ranks[r], states_[r], used);
      if (testing::Test::HasFatalFailure()) return;
    }
    std::size_t blocks = 0;
    for (const RankPlan& rank : plan_.ranks) blocks += rank.all<Block>().size();
    EXPECT_EQ(used.size(), blocks) << "blocks that no output holds";
  }

 private:
  static constexpr int kComputing = -1;
  static constexpr std::int64_t kNothing = -1;
  using BlockId = std::pair<std::size_t, std::size_t>;  // rank, task
  static constexpr std::size_t kNoRank = std::numeric_limits<std::size_t>::max();
  static constexpr BlockId kSinks{kNoRank, 0};
  static constexpr BlockId kUnnormalised{kNoRank, 1};
  using Tokens = std::vector<std::int64_t>;
  using Cell = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // batch, token, head
  using Held = std::multiset<BlockId>;  // blocks, kSinks and kUnnormalised
  using Results = std::map<Cell, Held>;

  enum class Phase : std::uint8_t { waiting, offered, taken, released };
  struct Other {
    std::size_t rank;
    std::size_t task;
    std::size_t transfer;  // index in its list
  };
  struct Queue {
    std::vector<std::size_t> tasks;
    std::size_t next = 0;
  };
  struct State {
    std::map<int, Queue> queues;
    std::vector<Phase> phases;  // by task; what is no exchange goes straight to released
    std::map<std::pair<int, Content>, Tokens> tokens;  // by memory
    std::map<int, Results> results;                    // by memory
    std::map<std::size_t, std::vector<Other>> senders, receivers;
  };

  static bool is_result(Content content) {
    return content == Content::output || content == Content::lse || content == Content::maximum ||
           content == Content::sum;
  }
  Results& results(std::size_t r, int buffer) {
    return states_[r].results[plan_.ranks[r].memory_of(buffer)];
  }
  // Moves what tokens of one buffer hold to others.
  static void move_results(const Results& from, LocalPosition from_begin, const Region& to,
                           Results& into) {
    std::vector<std::pair<Cell, Held>> moved;  // both may be the same
    each_cell(to, [&](const Cell& cell) {
      const auto& [batch, token, head] = cell;
      const Cell source{batch, from_begin.value() + (token - to.tokens.begin.value()), head};
      const auto found = from.find(source);
      ASSERT_TRUE(found != from.end()) << "a result that nobody has computed";
      moved.emplace_back(cell, found->second);
    });
    for (auto& [cell, held] : moved) into[cell] = std::move(held);
  }

  Tokens& tokens(std::size_t r, int buffer, Content content) {
    return states_[r].tokens[{plan_.ranks[r].memory_of(buffer), content}];
  }

  void start(const RankPlan& rank) {
    const auto r = static_cast<std::size_t>(rank.rank);
    State& state = states_[r];
    state.phases.assign(rank.tasks.size(), Phase::waiting);
    for (std::size_t t = 0; t < rank.tasks.size(); ++t) {
      const auto* exchange = std::get_if<Exchange>(&rank.tasks[t].work);
      state.queues[exchange == nullptr ? kComputing : exchange->group].tasks.push_back(t);
    }
    for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
      const Buffer& buffer = rank.buffers[i];
      const int index = static_cast<int>(i);
      ASSERT_LT(buffer.reuses, index);
      for (const Content content : buffer.contents) {
        if (is_result(content)) continue;
        Tokens& held = tokens(r, index, content);
        held.resize(std::max(held.size(), static_cast<std::size_t>(buffer.tokens.count)), kNothing);
        if (buffer.kind != BufferKind::caller) continue;
        const NamedSharding* const scores = scores_of(content);
        const NamedSharding& sharding = content == Content::query ? operands_.query : operands_.key;
        const PositionRanges own =
            scores != nullptr ? scores->positions(rank.rank, 2) : sharding.positions(rank.rank, 1);
        ASSERT_EQ(buffer.tokens.count, own.size());
        for (std::int64_t s = 0; s < own.size(); ++s) {
          held[static_cast<std::size_t>(s)] = own.global(LocalPosition(s)).value();
        }
      }
    }
  }

  // Of a bias or a mask; null for other contents.
  [[nodiscard]] const NamedSharding* scores_of(Content content) const {
    if (content == Content::bias && operands_.bias) return &*operands_.bias;
    if (content == Content::dense_mask && operands_.dense_mask) return &*operands_.dense_mask;
    return nullptr;
  }

  void match() {
    std::map<std::tuple<AxisNames, int, int>, std::vector<Other>> sent;
    each_transfer(&Exchange::sends,
                  [&](const Other& mine, const AxisNames& axes, int me, int peer, const Transfer&) {
                    sent[{axes, me, peer}].push_back(mine);
                  });
    std::map<std::tuple<AxisNames, int, int>, std::size_t> received;
    each_transfer(&Exchange::receives, [&](const Other& mine, const AxisNames& axes, int me,
                                           int peer, const Transfer& transfer) {
      const auto& messages = sent[{axes, peer, me}];
      const std::size_t ordinal = received[{axes, peer, me}]++;
      ASSERT_LT(ordinal, messages.size()) << "rank " << me << " waits for what nobody sends";
      const Other& sender = messages[ordinal];
      const auto& exchange = std::get<Exchange>(plan_.ranks[sender.rank].tasks[sender.task].work);
      const Transfer& message = exchange.sends[sender.transfer];
      EXPECT_EQ(message.tokens.count, transfer.tokens.count);
      EXPECT_EQ(message.bytes, transfer.bytes);
      EXPECT_EQ(message.origin, transfer.origin);
      EXPECT_EQ(plan_.ranks[sender.rank].buffer(message.buffer).heads,
                plan_.ranks[mine.rank].buffer(transfer.buffer).heads);
      states_[mine.rank].senders[mine.task].push_back(sender);
      states_[sender.rank].receivers[sender.task].push_back(mine);
    });
    for (const auto& [route, messages] : sent) {
      EXPECT_EQ(messages.size(), received[route]) << "something is sent that nobody receives";
    }
  }

  template <class Body>
  void each_transfer(std::vector<Transfer> Exchange::*side, const Body& body) const {
    for (std::size_t r = 0; r < plan_.ranks.size(); ++r) {
      const RankPlan& rank = plan_.ranks[r];
      for (std::size_t t = 0; t < rank.tasks.size(); ++t) {
        const auto* exchange = std::get_if<Exchange>(&rank.tasks[t].work);
        if (exchange == nullptr) continue;
        const PlanGroup& group = rank.groups[static_cast<std::size_t>(exchange->group)];
        const std::vector<Transfer>& transfers = exchange->*side;
        for (std::size_t i = 0; i < transfers.size(); ++i) {
          body({r, t, i}, group.axes, rank.rank,
               group.ranks[static_cast<std::size_t>(transfers[i].peer)], transfers[i]);
        }
      }
    }
  }

  [[nodiscard]] bool met(const State& state, const std::vector<Dependency>& dependencies) const {
    return std::all_of(dependencies.begin(), dependencies.end(), [&](const Dependency& d) {
      const Phase phase = state.phases[static_cast<std::size_t>(d.task)];
      return phase >= (d.stage == Stage::done ? Phase::taken : Phase::released);
    });
  }

  // A block that awaits columns counts as begun when the last of them have arrived.
  [[nodiscard]] bool arrived(const State& state, const Task& task) const {
    const auto* block = std::get_if<Block>(&task.work);
    if (block == nullptr) return true;
    LocalPosition from = block->columns.end();
    for (const Arrival& arrival : block->arrivals) {
      EXPECT_LE(arrival.columns.end(), from) << "columns arrive from the last to the first";
      from = arrival.columns.begin;
      if (!met(state, {{arrival.task, Stage::done}})) return false;
    }
    return true;
  }

  // One action of one queue, if there is any.
  bool step(std::size_t r) {
    State& state = states_[r];
    std::vector<int> queues;
    for (const auto& entry : state.queues) queues.push_back(entry.first);
    std::shuffle(queues.begin(), queues.end(), random_);
    for (const int q : queues) {
      Queue& queue = state.queues[q];
      if (queue.next == queue.tasks.size()) continue;
      const std::size_t t = queue.tasks[queue.next];
      const Task& task = plan_.ranks[r].tasks[t];
      if (q == kComputing) {
        if (!met(state, task.after) || !arrived(state, task)) continue;
        std::visit([&](const auto& work) { run(r, t, work); }, task.work);
        state.phases[t] = Phase::released;
        ++queue.next;
        return true;
      }
      if (advance(r, t, std::get<Exchange>(task.work))) {
        if (state.phases[t] == Phase::released) ++queue.next;
        return true;
      }
    }
    return false;
  }

  bool advance(std::size_t r, std::size_t t, const Exchange& exchange) {
    State& state = states_[r];
    Phase& phase = state.phases[t];
    if (phase == Phase::waiting) {
      if (!met(state, plan_.ranks[r].tasks[t].after)) return false;
      check_sends(r, exchange);
      phase = Phase::offered;
      return true;
    }
    if (phase == Phase::offered) {
      if (!met(state, exchange.receive_after)) return false;
      const auto& senders = state.senders[t];
      for (const Other& sender : senders) {
        if (states_[sender.rank].phases[sender.task] < Phase::offered) return false;
      }
      for (std::size_t i = 0; i < senders.size(); ++i) take(r, exchange.receives[i], senders[i]);
      phase = Phase::taken;
      return true;
    }
    for (const Other& receiver : state.receivers[t]) {
      if (states_[receiver.rank].phases[receiver.task] < Phase::taken) return false;
    }
    phase = Phase::released;
    return true;
  }

  void check_sends(std::size_t r, const Exchange& exchange) {
    const RankPlan& rank = plan_.ranks[r];
    for (const Transfer& transfer : exchange.sends) {
      const Buffer& buffer = rank.buffer(transfer.buffer);
      EXPECT_EQ(buffer.kind, BufferKind::exchange);
      EXPECT_GT(transfer.bytes, 0);
      EXPECT_EQ(transfer.bytes, transfer.tokens.count * rank.token_bytes(buffer));
      EXPECT_GE(transfer.tokens.begin, buffer.tokens.begin);
      EXPECT_LE(transfer.tokens.end(), buffer.tokens.end());
    }
  }

  void take(std::size_t r, const Transfer& transfer, const Other& sender) {
    const RankPlan& theirs = plan_.ranks[sender.rank];
    const Transfer& message =
        std::get<Exchange>(theirs.tasks[sender.task].work).sends[sender.transfer];
    const Buffer& from = theirs.buffer(message.buffer);
    const Buffer& to = plan_.ranks[r].buffer(transfer.buffer);
    ASSERT_EQ(from.contents, to.contents);
    EXPECT_EQ(from.columns, to.columns);
    for (const Content content : to.contents) {
      if (is_result(content)) {
        move_results(results(sender.rank, message.buffer), message.tokens.begin,
                     {transfer.buffer, transfer.tokens, to.heads, {0, plan_.ranks[r].local.batch}},
                     results(r, transfer.buffer));
        continue;
      }
      const Tokens& source = tokens(sender.rank, message.buffer, content);
      Tokens& target = tokens(r, transfer.buffer, content);
      for (std::int64_t i = 0; i < transfer.tokens.count; ++i) {
        const std::int64_t token =
            source.at(static_cast<std::size_t>(message.tokens.begin + i - from.tokens.begin));
        EXPECT_NE(token, kNothing) << "what was never written is sent";
        target.at(static_cast<std::size_t>(transfer.tokens.begin + i - to.tokens.begin)) = token;
      }
    }
  }

  void run(std::size_t /*r*/, std::size_t /*t*/, const Exchange& /*exchange*/) {}

  void run(std::size_t r, std::size_t /*t*/, const Copy& copy) {
    const RankPlan& rank = plan_.ranks[r];
    const Buffer& from = rank.buffer(copy.from);
    const Buffer& to = rank.buffer(copy.to.buffer);
    if (is_result(copy.content)) {
      return move_results(results(r, copy.from), copy.from_begin, copy.to,
                          results(r, copy.to.buffer));
    }
    for (std::int64_t i = 0; i < copy.to.tokens.count; ++i) {
      const LocalPosition source = copy.from_begin + i;
      const LocalPosition target = copy.to.tokens.begin + i;
      tokens(r, copy.to.buffer, copy.content)
          .at(static_cast<std::size_t>(target - to.tokens.begin)) =
          tokens(r, copy.from, copy.content)
              .at(static_cast<std::size_t>(source - from.tokens.begin));
    }
  }

  template <class Body>
  static void each_cell(const Region& region, const Body& body) {
    for (std::int64_t b = region.batches.begin; b < region.batches.end(); ++b) {
      for (LocalPosition i = region.tokens.begin; i < region.tokens.end(); i = i + 1) {
        for (std::int64_t h = region.heads.begin; h < region.heads.end(); ++h) {
          body(Cell{b, i.value(), h});
        }
      }
    }
  }

  void expect_within(const RankPlan& rank, const Result& result) {
    EXPECT_EQ(result.maximum >= 0, !plan_.problem.normalize_output);
    for (const int index : {result.output.buffer, result.lse, result.maximum}) {
      if (index < 0) continue;
      const Buffer& buffer = rank.buffer(index);
      EXPECT_GE(result.output.tokens.begin, buffer.tokens.begin);
      EXPECT_LE(result.output.tokens.end(), buffer.tokens.end());
      EXPECT_GE(result.output.heads.begin, buffer.heads.begin);
      EXPECT_LE(result.output.heads.end(), buffer.heads.end());
    }
    EXPECT_EQ(rank.buffer(result.output.buffer).contents, std::vector{Content::output});
    const Buffer& lse = rank.buffer(result.lse);
    const bool sum = lse.kind == BufferKind::caller && !plan_.problem.normalize_output;
    EXPECT_EQ(lse.contents, std::vector{sum ? Content::sum : Content::lse});
    if (result.maximum >= 0) {
      EXPECT_EQ(rank.buffer(result.maximum).contents, std::vector{Content::maximum});
      EXPECT_EQ(rank.buffer(result.maximum).dtype, DType::float32);
    }
  }

  // The block reads a bias or a mask of its own rows, heads and columns.
  void expect_scores(std::size_t r, const Block& block, int index, Content content) {
    const NamedSharding* const sharding = scores_of(content);
    ASSERT_EQ(index >= 0, sharding != nullptr);
    if (index < 0) return;
    const RankPlan& rank = plan_.ranks[r];
    const Buffer& buffer = rank.buffer(index);
    ASSERT_EQ(buffer.contents, std::vector{content});
    const Region read = rank.scores_of(block, index);
    EXPECT_GE(read.heads.begin, buffer.heads.begin);
    EXPECT_LE(read.heads.end(), buffer.heads.end());
    EXPECT_EQ(read.heads.count, sharding->global_shape()[1] == 1 ? 1 : block.heads.count);
    const bool has_rows = sharding->global_shape()[2] != 1;
    EXPECT_EQ(read.tokens.count, has_rows ? block.rows.count : 1);
    for (std::int64_t i = 0; i < read.tokens.count; ++i) {
      const auto at = static_cast<std::size_t>(read.tokens.begin + i - buffer.tokens.begin);
      ASSERT_EQ(tokens(r, index, content).at(at),
                has_rows ? block.row_positions.global(LocalPosition(i)).value() : 0);
    }
    if (!buffer.columns) return;
    const std::int64_t first = block.columns.begin - rank.buffer(block.key).tokens.begin;
    EXPECT_EQ(buffer.columns->slice({LocalPosition(first), block.columns.count}),
              block.column_positions);
  }

  void run(std::size_t r, std::size_t t, const Block& block) {
    const RankPlan& rank = plan_.ranks[r];
    expect_scores(r, block, block.bias, Content::bias);
    expect_scores(r, block, block.dense_mask, Content::dense_mask);
    ASSERT_EQ(block.row_positions.size(), block.rows.count);
    for (std::int64_t i = 0; i < block.rows.count; ++i) {
      const auto at =
          static_cast<std::size_t>(block.rows.begin + i - rank.buffer(block.query).tokens.begin);
      ASSERT_EQ(tokens(r, block.query, Content::query).at(at),
                block.row_positions.global(LocalPosition(i)).value());
    }
    ASSERT_EQ(block.column_positions.size(), block.columns.count);
    // Where heads differ, a block holds the mean over all of them, rounded up in every part of it.
    const std::int64_t heads = plan_.problem.mask.depends_on_head() ? plan_.problem.shape.heads : 1;
    std::int64_t visible = 0;
    for (std::int64_t s = 0; s < block.columns.count; ++s) {
      const std::int64_t column = block.column_positions.global(LocalPosition(s)).value();
      for (const auto& [buffer, content] :
           {std::pair(block.key, Content::key), std::pair(block.value, Content::value)}) {
        const auto at =
            static_cast<std::size_t>(block.columns.begin + s - rank.buffer(buffer).tokens.begin);
        ASSERT_EQ(tokens(r, buffer, content).at(at), column);
      }
      for (std::int64_t i = 0; i < block.rows.count; ++i) {
        const GlobalPosition row = block.row_positions.global(LocalPosition(i));
        for (std::int64_t b = block.batches.begin; b < block.batches.end(); ++b) {
          for (std::int64_t h = 0; h < heads; ++h) {
            visible += static_cast<int>(
                plan_.problem.mask.visible(rank.first_batch + b, h, row, GlobalPosition(column)));
          }
        }
      }
    }
    EXPECT_GE(block.pairs * heads, visible);
    const auto parts = static_cast<std::int64_t>(block.row_positions.ranges().size() *
                                                 block.column_positions.ranges().size());
    EXPECT_LE(block.pairs * heads, visible + (heads - 1) * parts * block.batches.count);
    EXPECT_EQ(block.full,
              visible == heads * block.rows.count * block.columns.count * block.batches.count);
    expect_within(rank, block.result);
    // What is continued lies where the result goes, or elsewhere.
    if (block.state) {
      expect_within(rank, *block.state);
      EXPECT_EQ(block.state->output.tokens, block.result.output.tokens);
    }
    each_part(block.result, [&](const Region& region, std::size_t part) {
      Results before;
      if (block.state) before = results(r, parts_of(*block.state)[part]);
      Results& into = results(r, region.buffer);
      each_cell(region, [&](const Cell& cell) {
        Held held;
        if (block.state) held = before.at(cell);
        held.insert(BlockId{r, t});
        into[cell] = std::move(held);
      });
    });
  }

  // Output, LSE and maximum, as far as there are.
  static std::array<int, 3> parts_of(const Result& result) {
    return {result.output.buffer, result.lse, result.maximum};
  }
  template <class Body>
  static void each_part(const Result& result, const Body& body) {
    const std::array<int, 3> buffers = parts_of(result);
    for (std::size_t part = 0; part < buffers.size(); ++part) {
      if (buffers[part] < 0) continue;
      Region region = result.output;
      region.buffer = buffers[part];
      body(region, part);
    }
  }

  void run(std::size_t r, std::size_t /*t*/, const Reduce& reduce) {
    const RankPlan& rank = plan_.ranks[r];
    expect_within(rank, reduce.into);
    for (const Result& part : reduce.parts) expect_within(rank, part);
    each_part(reduce.into, [&](const Region& region, std::size_t which) {
      Results sum;
      each_cell(region, [&](const Cell& cell) { sum[cell]; });
      for (const Result& part : reduce.parts) {
        const Results& held = results(r, parts_of(part)[which]);
        each_cell(part.output, [&](const Cell& cell) {
          ASSERT_TRUE(sum.contains(cell)) << "a part lies outside of the whole";
          ASSERT_TRUE(held.contains(cell)) << "a part that nobody has computed";
          EXPECT_FALSE(held.at(cell).contains(kUnnormalised)) << "a part that is complete already";
          sum[cell].insert(held.at(cell).begin(), held.at(cell).end());
        });
      }
      Results& into = results(r, region.buffer);
      for (auto& [cell, blocks] : sum) {
        if (reduce.sinks) blocks.insert(kSinks);
        if (reduce.unnormalised) blocks.insert(kUnnormalised);
        into[cell] = std::move(blocks);
      }
    });
  }

  void expect_results(const RankPlan& rank, const State& state, std::set<BlockId>& used) const {
    const AttentionProblem& problem = plan_.problem;
    const PositionRanges rows = operands_.query.positions(rank.rank, 1);
    const Region all{0,
                     {LocalPosition(0), rank.local.query_length},
                     {0, rank.local.heads},
                     {0, rank.local.batch}};
    std::int64_t cells = 0;
    each_cell(all, [&](const Cell&) { ++cells; });
    if (cells == 0) return;
    for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
      const Buffer& buffer = rank.buffers[i];
      if (buffer.kind != BufferKind::caller || !is_result(buffer.contents.front())) continue;
      SCOPED_TRACE(testing::Message()
                   << "rank " << rank.rank << ", " << name_of(buffer.contents.front()));
      const auto found = state.results.find(static_cast<int>(i));
      ASSERT_TRUE(found != state.results.end());
      EXPECT_EQ(static_cast<std::int64_t>(found->second.size()), cells);
      for (const auto& [cell, held] : found->second) {
        const auto& [batch, token, head] = cell;
        const GlobalPosition row = rows.global(LocalPosition(token));
        EXPECT_EQ(held.count(kSinks), problem.sinks ? 1U : 0U);
        EXPECT_EQ(held.count(kUnnormalised), problem.normalize_output ? 0U : 1U);
        std::vector<int> times(static_cast<std::size_t>(problem.shape.kv_length));
        for (const BlockId& id : held) {
          ASSERT_EQ(held.count(id), 1U) << "a block twice";
          if (id.first == kNoRank) continue;
          used.insert(id);
          for (const PositionRange& range : block_of(id).column_positions.ranges()) {
            for (std::int64_t c = 0; c < range.length; ++c) {
              ++times[static_cast<std::size_t>(range.at(c).value())];
            }
          }
        }
        for (std::int64_t column = 0; column < problem.shape.kv_length; ++column) {
          if (!problem.mask.visible(rank.first_batch + batch, rank.first_head + head, row,
                                    GlobalPosition(column))) {
            continue;
          }
          ASSERT_EQ(times[static_cast<std::size_t>(column)], 1)
              << "times that row " << row.value() << " sees column " << column << ", batch "
              << batch << ", head " << head;
        }
      }
    }
  }

  [[nodiscard]] const Block& block_of(const BlockId& id) const {
    return std::get<Block>(plan_.ranks[id.first].tasks[id.second].work);
  }

  const Plan& plan_;
  const ShardedOperands& operands_;
  std::mt19937 random_;
  std::vector<State> states_;
};

inline void expect_valid(const Plan& plan, const ShardedOperands& operands, unsigned seed = 1) {
  PlanPlayer player(plan, operands, seed);
  player.play();
  player.expect_complete();
}

}  // namespace annulus::ring
