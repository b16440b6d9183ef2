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
};

}  // namespace annulus::ring
