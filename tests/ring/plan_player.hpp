#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

#include "tests/ring/played_tasks.hpp"

namespace annulus::ring {

/// How many queues the exchanges of a rank go through.
enum class Queues : std::uint8_t {
  by_group,  ///< one for each group
  one        ///< all groups share one, in the order of the plan
};

/// Plays a plan. Tasks run in a random order, any that the queues and the dependencies of the plan
/// permit; what an exchange sends is read as late as it may be.
class PlanPlayer : public PlayedTasks {
 public:
  PlanPlayer(const Plan& plan, const ShardedOperands& operands, unsigned seed = 1,
             Queues queues = Queues::by_group)
      : PlayedTasks(plan, operands), random_(seed), queues_(queues) {
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

 private:
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
            each_cell(rank.whole(index),
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
    // The uses that end last so far: of all uses, and of uses that write.
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
    const Region into = plan_.ranks[r].whole(transfer.buffer).at(transfer.tokens);
    for (const Content content : to.contents) {
      move(sender.rank, message.buffer, message.tokens.begin, r, into, content);
    }
  }

  std::mt19937 random_;
  Queues queues_;
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
