// Blocks for kernels that know no other mask than one band with a length per batch.
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/local_mask.hpp>
#include <annulus/ring/planner.hpp>

#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

TEST(StraightBlocks, AreStraightOrCannotBeCut) {
  // 32 tokens a document, whatever the shards.
  std::vector<std::int32_t> cu;
  for (std::int32_t end = 0; end <= 256; end += 32) cu.push_back(end);
  const auto row = segments_from_cu_seqlens(cu, 256);
  for (const LayoutKind layout : {LayoutKind::contiguous, LayoutKind::zigzag}) {
    for (const Schedule schedule : {Schedule::ring, Schedule::allgather}) {
      for (const int batches : {0, 1, 2}) {  // that are packed
        const bool packed = batches > 0;
        AttentionProblem problem = causal_problem(256, 4, 2);
        if (packed) {
          std::vector<std::int32_t> ids;
          for (int b = 0; b < batches; ++b) ids.insert(ids.end(), row.begin(), row.end());
          problem.shape.batch = batches;
          problem.mask.set_segments(batches, ids, ids);
        }
        PlanOptions options;
        options.straight_blocks = true;
        const Plan plan = sequence_plan(problem, 4, layout, schedule, options);
        for (const RankPlan& rank : plan.ranks) {
          std::size_t blocks = 0;
          for (const Step& step : rank.steps) {
            blocks += step.blocks.size();
            for (const Block& block : step.blocks) {
              EXPECT_EQ(local_mask(problem.mask, 0, problem.shape.batch, block.row_positions,
                                   block.column_positions)
                            .obstacle,
                        "");
            }
          }
          // Documents that lie within a shard never meet another one.
          EXPECT_LE(blocks, packed ? 8U : 7U) << name_of(layout) << " " << name_of(schedule);
        }
      }
    }
  }
}

TEST(StraightBlocks, AreNotCutByLengths) {
  AttentionProblem problem = causal_problem(256, 4, 2);
  problem.shape.batch = 3;
  problem.mask.set_query_lengths({256, 100, 201});
  problem.mask.set_kv_lengths({190, 100, 0});
  PlanOptions options;
  options.straight_blocks = true;
  // Striped columns that were gathered are no band even without lengths.
  for (const auto& [layout, schedule] : {std::pair{LayoutKind::contiguous, Schedule::ring},
                                         std::pair{LayoutKind::zigzag, Schedule::ring},
                                         std::pair{LayoutKind::striped, Schedule::ring},
                                         std::pair{LayoutKind::contiguous, Schedule::allgather},
                                         std::pair{LayoutKind::zigzag, Schedule::allgather}}) {
    SCOPED_TRACE(testing::Message() << name_of(layout) << ", " << name_of(schedule));
    const Plan plan = sequence_plan(problem, 4, layout, schedule, options);
    for (const RankPlan& rank : plan.ranks) {
      for (const Step& step : rank.steps) {
        // The two ranges of a zigzag shard end at different columns of those gathered.
        const bool apart = layout == LayoutKind::zigzag && schedule == Schedule::allgather;
        EXPECT_LE(step.blocks.size(), apart ? 2U : 1U);
        for (const Block& block : step.blocks) {
          EXPECT_EQ(
              local_mask(problem.mask, 0, 3, block.row_positions, block.column_positions).obstacle,
              "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::ring
