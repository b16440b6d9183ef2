#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

#include "tests/ring/played_plan.hpp"

namespace annulus::ring {

/// Plays the tasks of a plan: each changes the state of its rank, and must find there what it
/// reads.
class PlayedTasks : public PlayedPlan {
 protected:
  using PlayedPlan::PlayedPlan;

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

  // Moves tokens, or results, from a buffer of one rank to a region of a rank's buffer.
  void move(std::size_t from_rank, int from, LocalPosition from_begin, std::size_t r,
            const Region& to, Content content) {
    if (!is_result(content)) return move_tokens(from_rank, from, from_begin, r, to, content);
    move_results(results(from_rank, from, content), from_begin, to, results(r, to.buffer, content));
  }

  void run(std::size_t /*r*/, std::size_t /*t*/, const Exchange& /*exchange*/) {}

  void run(std::size_t r, std::size_t /*t*/, const Copy& copy) {
    move(r, copy.from, copy.from_begin, r, copy.to, copy.content);
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
      if (buffers[part] >= 0) body(result.output.in(buffers[part]), part);
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
    each_cell(rank.whole(gradient.grad_sinks), [&](const Cell& cell) {
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
};

}  // namespace annulus::ring
