#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// The state of the ranks of a plan that is being played, and the state that must result: the
/// global position and head of every token in place of its query, key and value, and the blocks
/// that it contains in place of every result or gradient.
class PlayedPlan {
 public:
  PlayedPlan(const Plan& plan, const ShardedOperands& operands)
      : plan_(plan), operands_(operands), states_(plan.ranks.size()) {}

  /// The output of every row and head holds every visible pair exactly once, no block twice, and
  /// its sinks; and it is unnormalised exactly if the problem wants that. LSE and maximum hold the
  /// same. Nothing is computed in vain.
  void expect_complete() const {
    std::set<BlockId> used;
    for (std::size_t r = 0; r < states_.size(); ++r) {
      expect_results(r, used);
      if (plan_.backward) expect_sinks(r);
      if (testing::Test::HasFatalFailure()) return;
    }
    std::size_t blocks = 0;
    for (const RankPlan& rank : plan_.ranks) blocks += rank.tiles().size();
    EXPECT_EQ(used.size(), blocks) << "blocks that no result holds";
  }

 protected:
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

  Tokens& tokens(std::size_t r, int buffer, Content content) {
    return states_[r].tokens[{plan_.ranks[r].memory_of(buffer), content}];
  }

  // The sharding of a bias or a mask; null for other contents.
  [[nodiscard]] const NamedSharding* scores_of(Content content) const {
    if (content == Content::bias && operands_.bias) return &*operands_.bias;
    if (content == Content::dense_mask && operands_.dense_mask) return &*operands_.dense_mask;
    return nullptr;
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

  [[nodiscard]] const Tile& block_of(const BlockId& id) const {
    const auto& work = plan_.ranks[id.first].tasks[id.second].work;
    if (const auto* backward = std::get_if<BackwardBlock>(&work)) return *backward;
    return std::get<Block>(work);
  }

  const Plan& plan_;
  const ShardedOperands& operands_;
  bool adds_ = plan_.backward && plan_.backward->adds;
  std::vector<State> states_;

 private:
  // Pairs of the problem, by global index.
  struct Pairs {
    BatchRange batches;
    HeadRange heads;  // of queries
    PositionRange rows, columns;
  };

  // The pairs whose products a result or a gradient sums up. An entry of a bias's gradient also
  // stands for all batches, heads and rows over which the bias is broadcast.
  [[nodiscard]] Pairs pairs_of(const RankPlan& rank, Content content, const Cell& cell) const {
    const auto& [batch, token, head] = cell;
    const AttentionShape& whole = plan_.problem.shape;
    const std::int64_t ratio = whole.heads_per_kv_head();
    const std::int64_t of_head = global_head(rank, content, head);
    Pairs pairs{{rank.first_batch + batch, 1},
                {of_head, 1},
                {GlobalPosition(0), whole.query_length},
                {GlobalPosition(0), whole.kv_length}};
    if (content == Content::grad_bias) {
      const Extents& bias = *plan_.problem.bias;
      if (bias[0] == 1) pairs.batches = {0, whole.batch};
      if (bias[1] == 1) pairs.heads = {0, whole.heads};
      if (bias[2] == 1) return pairs;
    }
    if (content == Content::grad_key || content == Content::grad_value) {
      pairs.heads = {of_head * ratio, ratio};
      pairs.columns = {operands_.key.positions(rank.rank, 1).global(LocalPosition(token)), 1};
    } else {
      pairs.rows = {operands_.query.positions(rank.rank, 1).global(LocalPosition(token)), 1};
    }
    return pairs;
  }

  // Each visible one of the pairs is in exactly one of the blocks, and no block comes twice.
  void expect_once(const Held& held, const Pairs& pairs, std::set<BlockId>& used) const {
    const BatchRange& batches = pairs.batches;
    const HeadRange& heads = pairs.heads;
    const PositionRange& rows = pairs.rows;
    const PositionRange& columns = pairs.columns;
    const auto index = [&](std::int64_t b, std::int64_t n, GlobalPosition t, GlobalPosition s) {
      const std::int64_t row =
          ((b - batches.begin) * heads.count + n - heads.begin) * rows.length + (t - rows.start);
      return static_cast<std::size_t>(row * columns.length + (s - columns.start));
    };
    std::vector<int> times(
        static_cast<std::size_t>(batches.count * heads.count * rows.length * columns.length));
    // Calls body(position) for the positions of a tile that are among the wanted ones.
    const auto each = [](const PositionRanges& positions, const PositionRange& wanted,
                         const auto& body) {
      for (const PositionRange& range : positions.ranges()) {
        const LocalRange among = range.indices_within(wanted.start, wanted.start + wanted.length);
        for (std::int64_t i = among.begin.value(); i < among.end().value(); ++i) body(range.at(i));
      }
    };
    for (const BlockId& id : held) {
      ASSERT_EQ(held.count(id), 1U) << "a block twice";
      if (id.first == kNoRank) continue;
      used.insert(id);
      const RankPlan& of = plan_.ranks[id.first];
      const Tile& tile = block_of(id);
      const BatchRange in = of.global(tile.batches);
      const std::int64_t head = global_head(of, Content::query, tile.heads.begin);
      for (std::int64_t b = std::max(batches.begin, in.begin);
           b < std::min(batches.end(), in.end()); ++b) {
        for (std::int64_t n = std::max(heads.begin, head);
             n < std::min(heads.end(), head + tile.heads.count); ++n) {
          each(tile.row_positions, rows, [&](GlobalPosition t) {
            each(tile.column_positions, columns,
                 [&](GlobalPosition s) { ++times[index(b, n, t, s)]; });
          });
        }
      }
    }
    const Mask& mask = plan_.problem.mask;
    for (std::int64_t b = batches.begin; b < batches.end(); ++b) {
      for (std::int64_t n = heads.begin; n < heads.end(); ++n) {
        for (std::int64_t i = 0; i < rows.length; ++i) {
          for (std::int64_t j = 0; j < columns.length; ++j) {
            if (!mask.visible(b, n, rows.at(i), columns.at(j))) continue;
            ASSERT_EQ(times[index(b, n, rows.at(i), columns.at(j))], 1)
                << "times that row " << rows.at(i).value() << " sees column "
                << columns.at(j).value() << ", batch " << b << ", head " << n;
          }
        }
      }
    }
  }

  void expect_results(std::size_t r, std::set<BlockId>& used) const {
    const RankPlan& rank = plan_.ranks[r];
    const AttentionProblem& problem = plan_.problem;
    const bool normalised = problem.normalize_output;
    const std::vector<std::pair<Content, bool>> contents =
        plan_.backward
            ? std::vector<std::pair<Content, bool>>{{Content::grad_query, true},
                                                    {Content::grad_key, true},
                                                    {Content::grad_value, true},
                                                    {Content::grad_bias, plan_.backward->grad_bias}}
            : std::vector<std::pair<Content, bool>>{{Content::output, true},
                                                    {Content::lse, normalised},
                                                    {Content::maximum, !normalised},
                                                    {Content::sum, !normalised}};
    for (const auto& [content, wanted] : contents) {
      SCOPED_TRACE(testing::Message() << "rank " << rank.rank << ", " << name_of(content));
      const int index = rank.caller_buffer(content);
      ASSERT_EQ(index >= 0, wanted);
      if (!wanted) continue;
      const Buffer& buffer = rank.buffer(index);
      const std::int64_t cells =
          buffer.tokens.count * buffer.heads.count * rank.batches(buffer).count;
      if (cells == 0) continue;
      const auto found = states_[r].results.find(key_of(index, content));
      ASSERT_TRUE(found != states_[r].results.end()) << "a result that nobody writes";
      EXPECT_EQ(static_cast<std::int64_t>(found->second.size()), cells);
      for (const auto& [cell, held] : found->second) {
        EXPECT_EQ(held.count(kSinks), problem.sinks && !plan_.backward ? 1U : 0U);
        EXPECT_EQ(held.count(kUnnormalised), normalised ? 0U : 1U);
        EXPECT_EQ(held.count(kBefore), adds_ ? 1U : 0U);
        expect_once(held, pairs_of(rank, content, cell), used);
        if (testing::Test::HasFatalFailure()) return;
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
};

}  // namespace annulus::ring
