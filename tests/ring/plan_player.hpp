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

/// How many queues the exchanges of a rank go through.
enum class Queues : std::uint8_t {
  by_group,  ///< one for each group
  one        ///< all groups share one, in the order of the plan
};

/// Plays a plan with the global position and head of every token in place of its query, key and
/// value, and with the blocks that it holds in place of every result or gradient. Tasks run in a
/// random order, any that the queues and the dependencies of the plan permit; what an exchange
/// sends is read as late as it may be.
class PlanPlayer {
 public:
  PlanPlayer(const Plan& plan, const ShardedOperands& operands, unsigned seed = 1,
             Queues queues = Queues::by_group)
      : plan_(plan),
        operands_(operands),
        random_(seed),
        queues_(queues),
        states_(plan.ranks.size()) {
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
      EXPECT_TRUE(states_[r].unreleased.empty()) << "rank " << r << " sends what nobody takes";
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
      if (plan_.backward) {
        expect_gradients(r, used);
        expect_sinks(r);
        expect_bias(r);
      } else {
        expect_results(plan_.ranks[r], states_[r], used);
      }
      if (testing::Test::HasFatalFailure()) return;
    }
    std::size_t blocks = 0;
    for (const RankPlan& rank : plan_.ranks) blocks += rank.tiles().size();
    EXPECT_EQ(used.size(), blocks) << "blocks that no result holds";
  }

 private:
  static constexpr int kComputing = -1;
  static constexpr std::int64_t kNothing = -1;
  using BlockId = std::pair<std::size_t, std::size_t>;  // rank, task
  static constexpr std::size_t kNoRank = std::numeric_limits<std::size_t>::max();
  static constexpr BlockId kSinks{kNoRank, 0};
  static constexpr BlockId kUnnormalised{kNoRank, 1};
  static constexpr BlockId kBefore{kNoRank, 2};  // what a gradient held before the call
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
    std::vector<std::size_t> unreleased;  // exchanges that have received
    std::vector<Phase> phases;            // by task; what is no exchange goes straight to released
    std::map<std::pair<int, Content>, Tokens> tokens;    // by memory
    std::map<std::pair<int, Content>, Results> results;  // likewise
    std::map<std::size_t, std::vector<Other>> senders, receivers;
  };

  // Outputs and LSEs go into the backward pass, and come out of the forward pass.
  [[nodiscard]] bool is_result(Content content) const {
    if (plan_.backward) return is_gradient(content);
    return content == Content::output || content == Content::lse || content == Content::maximum ||
           content == Content::sum;
  }
  // Gradients of keys and values may share memory; what else is a result has memory of its own.
  static std::pair<int, Content> key_of(int memory, Content content) {
    return {memory, is_gradient(content) ? content : Content::output};
  }
  Results& results(std::size_t r, int buffer, Content content = Content::output) {
    return states_[r].results[key_of(plan_.ranks[r].memory_of(buffer), content)];
  }

  // A token of a head, by the head's global index.
  static constexpr std::int64_t kHeads = 1 << 12;
  static std::int64_t token_of(std::int64_t position, std::int64_t head) {
    return position * kHeads + head;
  }
  [[nodiscard]] std::int64_t global_head(const RankPlan& rank, Content content,
                                         std::int64_t head) const {
    if (const NamedSharding* const scores = scores_of(content)) {
      return scores->positions(rank.rank, 1).global(LocalPosition(head)).value();
    }
    const NamedSharding& sharding = has_query_heads(content) ? operands_.query : operands_.key;
    return sharding.positions(rank.rank, 2).global(LocalPosition(head)).value();
  }
  // Where a token of a head lies.
  static std::size_t index_in(const Buffer& buffer, LocalPosition token, std::int64_t head) {
    return static_cast<std::size_t>((token - buffer.tokens.begin) * buffer.heads.count + head -
                                    buffer.heads.begin);
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
      const int queue = exchange == nullptr      ? kComputing
                        : queues_ == Queues::one ? 0
                                                 : exchange->group;
      state.queues[queue].tasks.push_back(t);
    }
    for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
      const Buffer& buffer = rank.buffers[i];
      const int index = static_cast<int>(i);
      ASSERT_LT(buffer.reuses, index);
      for (const Content content : buffer.contents) {
        if (is_result(content)) {
          if (buffer.kind == BufferKind::caller && is_gradient(content) && adds_) {
            each_cell({index, buffer.tokens, buffer.heads, rank.batches(buffer)},
                      [&](const Cell& cell) { results(r, index, content)[cell].insert(kBefore); });
          }
          continue;
        }
        Tokens& held = tokens(r, index, content);
        held.resize(std::max(held.size(),
                             static_cast<std::size_t>(buffer.tokens.count * buffer.heads.count)),
                    kNothing);
        if (buffer.kind != BufferKind::caller) continue;
        const NamedSharding* const scores = scores_of(content);
        const NamedSharding& sharding = has_query_heads(content) ? operands_.query : operands_.key;
        const PositionRanges own =
            scores != nullptr ? scores->positions(rank.rank, 2) : sharding.positions(rank.rank, 1);
        ASSERT_EQ(buffer.tokens.count, own.size());
        for (std::int64_t s = 0; s < own.size(); ++s) {
          for (std::int64_t head = 0; head < buffer.heads.count; ++head) {
            held[index_in(buffer, LocalPosition(s), head)] =
                token_of(own.global(LocalPosition(s)).value(), global_head(rank, content, head));
          }
        }
      }
    }
  }

  // The sharding of a bias or a mask; null for other contents.
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
        if (state.phases[t] == Phase::taken) {
          state.unreleased.push_back(t);
          ++queue.next;
        }
        return true;
      }
    }
    return release(r);
  }

  // Releases an exchange whose sends have all been taken, if there is one.
  bool release(std::size_t r) {
    State& state = states_[r];
    std::shuffle(state.unreleased.begin(), state.unreleased.end(), random_);
    const auto found = std::ranges::find_if(state.unreleased, [&](std::size_t t) {
      return std::ranges::all_of(state.receivers[t], [&](const Other& receiver) {
        return states_[receiver.rank].phases[receiver.task] >= Phase::taken;
      });
    });
    if (found == state.unreleased.end()) return false;
    state.phases[*found] = Phase::released;
    state.unreleased.erase(found);
    return true;
  }

  bool advance(std::size_t r, std::size_t t, const Exchange& exchange) {
    State& state = states_[r];
    Phase& phase = state.phases[t];
    if (phase == Phase::waiting) {
      if (!met(state, plan_.ranks[r].tasks[t].after)) return false;
      check_sends(r, exchange);
      check_memory(r, exchange);
      phase = Phase::offered;
      return true;
    }
    if (!met(state, exchange.receive_after)) return false;
    const auto& senders = state.senders[t];
    for (const Other& sender : senders) {
      if (states_[sender.rank].phases[sender.task] < Phase::offered) return false;
    }
    for (std::size_t i = 0; i < senders.size(); ++i) take(r, exchange.receives[i], senders[i]);
    phase = Phase::taken;
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

  // Messages of an exchange travel at the same time: none may write memory that another one uses.
  void check_memory(std::size_t r, const Exchange& exchange) {
    struct Use {
      int memory;
      std::int64_t begin, end;  // bytes
      bool written;
    };
    const RankPlan& rank = plan_.ranks[r];
    std::vector<Use> uses;
    const auto add = [&](const std::vector<Transfer>& transfers, bool written) {
      for (const Transfer& transfer : transfers) {
        const Buffer& buffer = rank.buffer(transfer.buffer);
        const std::int64_t begin =
            (transfer.tokens.begin - buffer.tokens.begin) * rank.token_bytes(buffer);
        uses.push_back({rank.memory_of(transfer.buffer), begin, begin + transfer.bytes, written});
      }
    };
    add(exchange.sends, false);
    add(exchange.receives, true);
    std::ranges::sort(uses, {}, [](const Use& use) { return std::tuple(use.memory, use.begin); });
    // The uses that end last so far: of all, and of those that write.
    const Use* last = nullptr;
    const Use* last_written = nullptr;
    for (const Use& use : uses) {
      const Use* const other = use.written ? last : last_written;
      if (other != nullptr && other->memory == use.memory) {
        EXPECT_LE(other->end, use.begin) << "rank " << r << " uses memory twice in an exchange";
      }
      const auto update = [&](const Use*& kept) {
        if (kept == nullptr || kept->memory != use.memory || kept->end < use.end) kept = &use;
      };
      update(last);
      if (use.written) update(last_written);
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
    ASSERT_EQ(from.heads, to.heads);
    for (const Content content : to.contents) {
      if (is_result(content)) {
        move_results(results(sender.rank, message.buffer, content), message.tokens.begin,
                     {transfer.buffer, transfer.tokens, to.heads, plan_.ranks[r].batches(to)},
                     results(r, transfer.buffer, content));
        continue;
      }
      move_tokens(sender.rank, message.buffer, message.tokens.begin, r,
                  {transfer.buffer, transfer.tokens, to.heads, {}}, content);
    }
  }

  void move_tokens(std::size_t from_rank, int from, LocalPosition from_begin, std::size_t r,
                   const Region& to, Content content) {
    const Buffer& source = plan_.ranks[from_rank].buffer(from);
    const Buffer& target = plan_.ranks[r].buffer(to.buffer);
    for (std::int64_t i = 0; i < to.tokens.count; ++i) {
      for (std::int64_t head = to.heads.begin; head < to.heads.end(); ++head) {
        const std::int64_t token =
            tokens(from_rank, from, content).at(index_in(source, from_begin + i, head));
        EXPECT_NE(token, kNothing) << "what was never written is read";
        tokens(r, to.buffer, content).at(index_in(target, to.tokens.begin + i, head)) = token;
      }
    }
  }

  void run(std::size_t /*r*/, std::size_t /*t*/, const Exchange& /*exchange*/) {}

  void run(std::size_t r, std::size_t /*t*/, const Copy& copy) {
    if (is_result(copy.content)) {
      return move_results(results(r, copy.from, copy.content), copy.from_begin, copy.to,
                          results(r, copy.to.buffer, copy.content));
    }
    move_tokens(r, copy.from, copy.from_begin, r, copy.to, copy.content);
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
  void expect_scores(std::size_t r, const Tile& block, int index, Content content) {
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
      for (std::int64_t head = read.heads.begin; head < read.heads.end(); ++head) {
        ASSERT_EQ(tokens(r, index, content).at(index_in(buffer, read.tokens.begin + i, head)),
                  token_of(has_rows ? block.row_positions.global(LocalPosition(i)).value() : 0,
                           global_head(rank, content, head)));
      }
    }
    if (!buffer.columns) return;
    const std::int64_t first = block.columns.begin - rank.buffer(block.key).tokens.begin;
    EXPECT_EQ(buffer.columns->slice({LocalPosition(first), block.columns.count}),
              block.column_positions);
  }

  // A buffer holds a tile's rows, or its columns, for its heads.
  void expect_tokens(std::size_t r, int index, Content content, LocalRange at, HeadRange heads,
                     const PositionRanges& positions) {
    const RankPlan& rank = plan_.ranks[r];
    const Buffer& buffer = rank.buffer(index);
    ASSERT_EQ(positions.size(), at.count);
    for (std::int64_t i = 0; i < at.count; ++i) {
      const std::int64_t position = positions.global(LocalPosition(i)).value();
      for (std::int64_t head = heads.begin; head < heads.end(); ++head) {
        ASSERT_EQ(tokens(r, index, content).at(index_in(buffer, at.begin + i, head)),
                  token_of(position, global_head(rank, content, head)))
            << name_of(content);
      }
    }
  }

  void expect_tile(std::size_t r, const Tile& block) {
    const RankPlan& rank = plan_.ranks[r];
    expect_scores(r, block, block.bias, Content::bias);
    expect_scores(r, block, block.dense_mask, Content::dense_mask);
    expect_tokens(r, block.query, Content::query, block.rows, block.heads, block.row_positions);
    const HeadRange kv_heads = rank.kv_heads_of(block.heads);
    EXPECT_TRUE(kv_heads.count == 1 ||
                block.heads.count == kv_heads.count * rank.local.heads_per_kv_head())
        << "neither whole groups of query heads nor a part of one";
    expect_tokens(r, block.key, Content::key, block.columns, kv_heads, block.column_positions);
    expect_tokens(r, block.value, Content::value, block.columns, kv_heads, block.column_positions);
    // Where heads differ, a block holds the mean over all of them, rounded up in every part of it.
    const std::int64_t heads = plan_.problem.mask.depends_on_head() ? plan_.problem.shape.heads : 1;
    std::int64_t visible = 0;
    for (std::int64_t s = 0; s < block.columns.count; ++s) {
      const std::int64_t column = block.column_positions.global(LocalPosition(s)).value();
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
    // Calls with values of their own may hide more than the plan's problem does.
    EXPECT_EQ(block.full,
              !plan_.problem.call_arguments.change_visibility() &&
                  visible == heads * block.rows.count * block.columns.count * block.batches.count);
  }

  void run(std::size_t r, std::size_t t, const Block& block) {
    const RankPlan& rank = plan_.ranks[r];
    expect_tile(r, block);
    expect_within(rank, block.result);
    // A continued state lies where the result goes, or elsewhere.
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

  void run(std::size_t r, std::size_t /*t*/, const Delta& delta) {
    const RankPlan& rank = plan_.ranks[r];
    const Buffer& buffer = rank.buffer(delta.delta);
    const auto at = [&](int index, Content content, LocalPosition token, std::int64_t head) {
      return tokens(r, index, content).at(index_in(rank.buffer(index), token, head));
    };
    for (std::int64_t i = 0; i < delta.output.tokens.count; ++i) {
      for (std::int64_t head = delta.output.heads.begin; head < delta.output.heads.end(); ++head) {
        const LocalPosition token = delta.output.tokens.begin + i;
        const std::int64_t row = at(delta.output.buffer, Content::output, token, head);
        ASSERT_EQ(at(delta.grad_output, Content::grad_output, token, head), row);
        if (delta.grad_lse >= 0) {
          ASSERT_EQ(at(delta.grad_lse, Content::grad_lse, token, head), row);
        }
        tokens(r, delta.delta, Content::delta).at(index_in(buffer, token, head)) = row;
      }
    }
  }

  // Each sink holds the parts of all rows of its head.
  void run(std::size_t r, std::size_t t, const SinkGradient& gradient) {
    const RankPlan& rank = plan_.ranks[r];
    const PositionRanges rows = operands_.query.positions(rank.rank, 1);
    EXPECT_EQ(gradient.delta.tokens.count, rows.size());
    EXPECT_EQ(gradient.delta.batches, (BatchRange{0, rank.local.batch}));
    const HeadRange heads{0, rank.local.heads};
    EXPECT_EQ(gradient.delta.heads, heads);
    expect_tokens(r, gradient.delta.buffer, Content::delta, gradient.delta.tokens, heads, rows);
    expect_tokens(r, gradient.lse, Content::lse, gradient.delta.tokens, heads, rows);
    Results& into = results(r, gradient.grad_sinks, Content::grad_sinks);
    const Buffer& sinks = rank.buffer(gradient.grad_sinks);
    each_cell({gradient.grad_sinks, sinks.tokens, sinks.heads, rank.batches(sinks)},
              [&](const Cell& cell) {
                into[cell] = {BlockId{r, t}};
              });
  }

  void run(std::size_t r, std::size_t t, const BackwardBlock& block) {
    expect_tile(r, block);
    for (const auto& [buffer, content] :
         {std::pair(block.grad_output, Content::grad_output), std::pair(block.lse, Content::lse),
          std::pair(block.delta, Content::delta)}) {
      expect_tokens(r, buffer, content, block.rows, block.heads, block.row_positions);
    }
    EXPECT_EQ(block.grad_query.tokens.count, block.rows.count);
    EXPECT_EQ(block.grad_key.tokens.count, block.columns.count);
    EXPECT_EQ(block.grad_key.tokens, block.grad_value.tokens);
    EXPECT_EQ(block.grad_query.buffer >= 0, block.gradients.rows);
    EXPECT_EQ(block.grad_key.buffer >= 0, block.gradients.columns);
    EXPECT_EQ(block.grad_value.buffer >= 0, block.gradients.columns);
    ASSERT_EQ(block.grad_bias.buffer >= 0, block.gradients.rows && plan_.backward->grad_bias);
    for (const auto& [gradient, content] : {std::pair(&block.grad_query, Content::grad_query),
                                            std::pair(&block.grad_key, Content::grad_key),
                                            std::pair(&block.grad_value, Content::grad_value),
                                            std::pair(&block.grad_bias, Content::grad_bias)}) {
      if (gradient->buffer < 0) continue;
      Results& into = results(r, gradient->buffer, content);
      each_cell(*gradient, [&](const Cell& cell) {
        ASSERT_TRUE(into.contains(cell)) << "a gradient that nobody has zeroed";
        into[cell].insert(BlockId{r, t});
      });
    }
  }

  // Parts cover the sum, and one of them may lie where it does.
  void sum(std::size_t r, const Reduce& reduce) {
    for (const Content content : plan_.ranks[r].buffer(reduce.into.output.buffer).contents) {
      Results total;
      each_cell(reduce.into.output, [&](const Cell& cell) { total[cell]; });
      for (const Result& part : reduce.parts) {
        ASSERT_EQ(part.output.tokens.count, reduce.into.output.tokens.count);
        ASSERT_EQ(part.output.heads, reduce.into.output.heads);
        const Results& held = results(r, part.output.buffer, content);
        each_cell(reduce.into.output, [&](const Cell& cell) {
          const auto& [batch, token, head] = cell;
          const Cell source{
              batch,
              part.output.tokens.begin.value() + (token - reduce.into.output.tokens.begin.value()),
              head};
          ASSERT_TRUE(held.contains(source)) << "a part that nobody has computed";
          total[cell].insert(held.at(source).begin(), held.at(source).end());
        });
      }
      Results& into = results(r, reduce.into.output.buffer, content);
      for (auto& [cell, blocks] : total) into[cell] = std::move(blocks);
    }
  }

  void run(std::size_t r, std::size_t /*t*/, const Reduce& reduce) {
    const RankPlan& rank = plan_.ranks[r];
    if (reduce.reduction == Reduction::sum) return sum(r, reduce);
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
      const Content content = buffer.contents.front();
      if (buffer.kind != BufferKind::caller || !is_result(content)) {
        continue;
      }
      SCOPED_TRACE(testing::Message()
                   << "rank " << rank.rank << ", " << name_of(buffer.contents.front()));
      const auto found = state.results.find(key_of(static_cast<int>(i), content));
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

  // Every gradient of a row and head holds each column that it sees once; every gradient of a
  // column and key/value head, each row and query head that sees it.
  void expect_gradients(std::size_t r, std::set<BlockId>& used) const {
    const RankPlan& rank = plan_.ranks[r];
    const AttentionShape& whole = plan_.problem.shape;
    const std::int64_t ratio = whole.heads_per_kv_head();
    for (const Content content : {Content::grad_query, Content::grad_key, Content::grad_value}) {
      SCOPED_TRACE(testing::Message() << "rank " << rank.rank << ", " << name_of(content));
      const int index = rank.caller_buffer(content);
      const Buffer& buffer = rank.buffer(index);
      if (buffer.tokens.count * buffer.heads.count * rank.local.batch == 0) continue;
      const auto found = states_[r].results.find({index, content});
      ASSERT_TRUE(found != states_[r].results.end()) << "a gradient that nobody writes";
      const bool rows = content == Content::grad_query;
      const PositionRanges own = (rows ? operands_.query : operands_.key).positions(rank.rank, 1);
      EXPECT_EQ(static_cast<std::int64_t>(found->second.size()),
                buffer.tokens.count * buffer.heads.count * rank.local.batch);
      for (const auto& [cell, held] : found->second) {
        const auto& [batch, token, head] = cell;
        const GlobalPosition position = own.global(LocalPosition(token));
        EXPECT_EQ(held.count(kBefore), adds_ ? 1U : 0U);
        const std::int64_t of_head = global_head(rank, content, head);
        const std::int64_t others = rows ? whole.kv_length : whole.query_length;
        const std::int64_t heads = rows ? 1 : ratio;
        std::vector<int> times(static_cast<std::size_t>(others * heads));
        for (const BlockId& id : held) {
          ASSERT_EQ(held.count(id), 1U) << "a block twice";
          if (id.first == kNoRank) continue;
          used.insert(id);
          count(block_of(id), plan_.ranks[id.first], rows, of_head * heads, heads, times);
        }
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t other = 0; other < others; ++other) {
            const GlobalPosition there(other);
            const bool visible =
                plan_.problem.mask.visible(rank.first_batch + batch, of_head * heads + h,
                                           rows ? position : there, rows ? there : position);
            if (!visible) continue;
            ASSERT_EQ(times[static_cast<std::size_t>(h * others + other)], 1)
                << "times that " << other << " counts for " << position.value() << ", batch "
                << batch << ", head " << head;
          }
        }
      }
    }
  }

  // The gradient of a sink holds every row of its head, or of all heads that share it, once.
  void expect_sinks(std::size_t r) const {
    const RankPlan& rank = plan_.ranks[r];
    const int index = rank.caller_buffer(Content::grad_sinks);
    ASSERT_EQ(index >= 0, plan_.backward->grad_sinks);
    if (index < 0) return;
    const AttentionShape& whole = plan_.problem.shape;
    const bool shared = plan_.problem.sinks->shape().rank() == 1;
    const auto found = states_[r].results.find({index, Content::grad_sinks});
    ASSERT_TRUE(found != states_[r].results.end()) << "a gradient of sinks that nobody writes";
    EXPECT_EQ(static_cast<std::int64_t>(found->second.size()), shared ? 1 : rank.local.heads);
    for (const auto& [cell, held] : found->second) {
      const std::int64_t head = rank.first_head + std::get<2>(cell);
      std::map<Cell, int> times;
      EXPECT_EQ(held.count(kBefore), adds_ ? 1U : 0U);
      for (const BlockId& id : held) {
        ASSERT_EQ(held.count(id), 1U) << "a part twice";
        if (id.first == kNoRank) continue;
        const RankPlan& of = plan_.ranks[id.first];
        const PositionRanges rows = operands_.query.positions(of.rank, 1);
        each_cell(std::get<SinkGradient>(of.tasks[id.second].work).delta, [&](const Cell& row) {
          const auto& [b, t, n] = row;
          ++times[{of.first_batch + b, rows.global(LocalPosition(t)).value(), of.first_head + n}];
        });
      }
      const HeadRange heads = shared ? HeadRange{0, whole.heads} : HeadRange{head, 1};
      each_cell({0, {LocalPosition(0), whole.query_length}, heads, {0, whole.batch}},
                [&](const Cell& row) { EXPECT_EQ(times[row], 1) << "times that a row counts"; });
    }
  }

  // An entry of the bias's gradient holds every visible pair of its row and head once, or of all
  // rows, heads and batches over which the bias is broadcast.
  void expect_bias(std::size_t r) const {
    const RankPlan& rank = plan_.ranks[r];
    const int index = rank.caller_buffer(Content::grad_bias);
    ASSERT_EQ(index >= 0, plan_.backward->grad_bias);
    if (index < 0) return;
    SCOPED_TRACE(testing::Message() << "rank " << rank.rank << ", grad bias");
    const AttentionShape& whole = plan_.problem.shape;
    const Extents& shape = *rank.bias;
    const Extents& all = *plan_.problem.bias;
    if (shape[0] * shape[1] * shape[2] == 0) return;
    const auto found = states_[r].results.find({index, Content::grad_bias});
    ASSERT_TRUE(found != states_[r].results.end()) << "a gradient of a bias that nobody writes";
    EXPECT_EQ(static_cast<std::int64_t>(found->second.size()), shape[0] * shape[1] * shape[2]);
    // The global indices that entry `local` of a dimension of the bias stands for.
    const auto stands_for = [&](int dim, std::int64_t local, std::int64_t count) {
      const std::int64_t first =
          operands_.bias->positions(rank.rank, dim).global(LocalPosition(local)).value();
      return all[dim] == 1 ? std::pair(std::int64_t{0}, count) : std::pair(first, first + 1);
    };
    for (const auto& [cell, held] : found->second) {
      const auto& [batch, token, head] = cell;
      EXPECT_EQ(held.count(kBefore), adds_ ? 1U : 0U);
      std::map<Cell, std::vector<int>> times;  // by batch, row and head: of each column
      for (const BlockId& id : held) {
        ASSERT_EQ(held.count(id), 1U) << "a block twice";
        if (id.first == kNoRank) continue;
        const RankPlan& of = plan_.ranks[id.first];
        const Tile& tile = block_of(id);
        const std::int64_t first_head = global_head(of, Content::query, tile.heads.begin);
        const BatchRange batches = of.global(tile.batches);
        each_cell({0, {LocalPosition(0), tile.rows.count}, {first_head, tile.heads.count}, batches},
                  [&](const Cell& local) {
                    const auto& [b, t, n] = local;
                    std::vector<int>& columns =
                        times[{b, tile.row_positions.global(LocalPosition(t)).value(), n}];
                    columns.resize(static_cast<std::size_t>(whole.kv_length));
                    for (std::int64_t s = 0; s < tile.columns.count; ++s) {
                      const auto column = tile.column_positions.global(LocalPosition(s)).value();
                      ++columns[static_cast<std::size_t>(column)];
                    }
                  });
      }
      const auto [batch_begin, batch_end] = stands_for(0, batch, whole.batch);
      const auto [head_begin, head_end] = stands_for(1, head, whole.heads);
      const auto [row_begin, row_end] = stands_for(2, token, whole.query_length);
      for (std::int64_t b = batch_begin; b < batch_end; ++b) {
        for (std::int64_t n = head_begin; n < head_end; ++n) {
          for (std::int64_t t = row_begin; t < row_end; ++t) {
            std::vector<int>& columns = times[{b, t, n}];
            columns.resize(static_cast<std::size_t>(whole.kv_length));
            for (std::int64_t s = 0; s < whole.kv_length; ++s) {
              const bool visible =
                  plan_.problem.mask.visible(b, n, GlobalPosition(t), GlobalPosition(s));
              if (!visible) continue;
              ASSERT_EQ(columns[static_cast<std::size_t>(s)], 1)
                  << "times that row " << t << " sees column " << s << ", batch " << b << ", head "
                  << n;
            }
          }
        }
      }
    }
  }

  // Adds a block's columns, or its rows of the `heads` query heads from `first` on.
  void count(const Tile& tile, const RankPlan& of, bool columns, std::int64_t first,
             std::int64_t heads, std::vector<int>& times) const {
    const PositionRanges& positions = columns ? tile.column_positions : tile.row_positions;
    const auto others = static_cast<std::int64_t>(times.size()) / heads;
    for (std::int64_t h = 0; h < heads; ++h) {
      if (!columns) {
        const std::int64_t begin = global_head(of, Content::query, tile.heads.begin);
        if (first + h < begin || first + h >= begin + tile.heads.count) continue;
      }
      for (const PositionRange& range : positions.ranges()) {
        for (std::int64_t i = 0; i < range.length; ++i) {
          ++times[static_cast<std::size_t>(h * others + range.at(i).value())];
        }
      }
    }
  }

  [[nodiscard]] const Tile& block_of(const BlockId& id) const {
    const auto& work = plan_.ranks[id.first].tasks[id.second].work;
    if (const auto* backward = std::get_if<BackwardBlock>(&work)) return *backward;
    return std::get<Block>(work);
  }

  const Plan& plan_;
  const ShardedOperands& operands_;
  std::mt19937 random_;
  Queues queues_;
  bool adds_ = plan_.backward && plan_.backward->adds;
  std::vector<State> states_;
};

inline void expect_valid(const Plan& plan, const ShardedOperands& operands, unsigned seed = 1) {
  for (const Queues queues : {Queues::by_group, Queues::one}) {
    PlanPlayer player(plan, operands, seed, queues);
    player.play();
    player.expect_complete();
    if (plan.ranks.empty() || plan.ranks.front().groups.size() == 1) return;
  }
}

}  // namespace annulus::ring
