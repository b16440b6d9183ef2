// Blocks for kernels that know no other mask than one band with a length per batch, such as
// cuDNN's: what the planner cuts so that they can take it.
#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/local_mask.hpp>
#include <annulus/ring/planner.hpp>

#include "tests/ring/plan_player.hpp"
#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

constexpr int kRanks = 4;

// That cuDNN computes every block, each of which is straight; returns the most blocks of a rank.
std::size_t expect_straight(const AttentionProblem& problem, LayoutKind layout, Schedule schedule) {
  SCOPED_TRACE(testing::Message() << name_of(layout) << ", " << name_of(schedule) << ", mask "
                                  << to_string(problem.mask));
  // Small problems would be faster as they are: the other kernel must be slower still.
  PlanInput input = gpu_input(problem, sequence_operands(problem, kRanks, layout));
  set_rate(input.prices, "native", 1e6);
  const Plan plan = make_plan(input, schedule);
  std::size_t most = 0;
  for (const RankPlan& rank : plan.ranks) {
    const std::vector<const Block*> blocks = rank.all<Block>();
    most = std::max(most, blocks.size());
    for (const Block* block : blocks) {
      EXPECT_EQ(rank.implementation_of(*block), "sdpa");
      EXPECT_EQ(local_mask(problem.mask, rank.first_batch + block->batches.begin,
                           block->batches.count, block->row_positions, block->column_positions)
                    .obstacle,
                "");
    }
  }
  expect_valid(plan, input.operands);
  return most;
}

std::vector<std::int32_t> documents_of(std::int32_t size, std::int32_t length) {
  std::vector<std::int32_t> cu;
  for (std::int32_t end = 0; end < length; end += size) cu.push_back(end);
  cu.push_back(length);
  return segments_from_cu_seqlens(cu, length);
}

constexpr std::array kCuttable{std::pair{LayoutKind::contiguous, Schedule::ring},
                               std::pair{LayoutKind::zigzag, Schedule::ring},
                               std::pair{LayoutKind::contiguous, Schedule::allgather},
                               std::pair{LayoutKind::zigzag, Schedule::allgather}};

TEST(StraightBlocks, CausalAndPackedShardsAreCut) {
  for (const auto& [layout, schedule] : kCuttable) {
    for (const int batches : {0, 1, 2}) {  // that are packed
      const bool packed = batches > 0;
      AttentionProblem problem = causal_problem(256, 4, 2);
      if (packed) {
        // 32 tokens a document, whatever the shards.
        const auto row = documents_of(32, 256);
        std::vector<std::int32_t> ids;
        for (int b = 0; b < batches; ++b) ids.insert(ids.end(), row.begin(), row.end());
        problem.shape.batch = batches;
        problem.mask.set_segments(batches, ids, ids);
      }
      // Documents that lie within a shard never meet another one.
      EXPECT_LE(expect_straight(problem, layout, schedule), packed ? 8U : 7U);
    }
  }
}

// Unless their bits must not vary, or the LSE has a gradient, which cuDNN cannot be told.
TEST(StraightBlocks, CudnnComputesGradientsOfShards) {
  const auto computed_by = [](LayoutKind layout, Schedule schedule, Reproducible reproducible,
                              bool grad_lse) {
    AttentionProblem problem = causal_problem(256, 4, 2);
    problem.reproducible = reproducible;
    PlanInput input = gpu_input(problem, sequence_operands(problem, kRanks, layout));
    set_rate(input.prices, "native", 1e6);
    input.backward = BackwardRequest{.grad_lse = grad_lse};
    std::set<std::string> names;
    for (const RankPlan& rank : make_plan(input, schedule).ranks) {
      for (const BackwardBlock* block : rank.all<BackwardBlock>()) {
        names.insert(rank.implementation_of(*block));
      }
    }
    return names;
  };
  const std::set<std::string> cudnn{"sdpa"}, plain{"native"};
  for (const auto& [layout, schedule] : kCuttable) {
    EXPECT_EQ(computed_by(layout, schedule, Reproducible::no, false), cudnn);
    EXPECT_EQ(computed_by(layout, schedule, Reproducible::run, false), plain);
    EXPECT_EQ(computed_by(layout, schedule, Reproducible::no, true), plain);
  }
}

TEST(StraightBlocks, BatchesWithOtherDocumentsAreTakenOneByOne) {
  for (const auto& [layout, schedule] : kCuttable) {
    AttentionProblem problem = causal_problem(256, 4, 2);
    problem.shape.batch = 2;
    std::vector<std::int32_t> ids = documents_of(32, 256);
    const auto other = documents_of(48, 256);
    ids.insert(ids.end(), other.begin(), other.end());
    problem.mask.set_segments(2, ids, ids);
    (void)expect_straight(problem, layout, schedule);
  }
}

TEST(StraightBlocks, GatheredColumnsOfStripedShardsAreCutByOwner) {
  for (const bool causal : {true, false}) {
    AttentionProblem problem = causal_problem(256, 4, 2);
    problem.mask.set_causal(causal);
    EXPECT_LE(expect_straight(problem, LayoutKind::striped, Schedule::ring), 4U);
    EXPECT_LE(expect_straight(problem, LayoutKind::striped, Schedule::allgather), 4U);
  }
}

TEST(StraightBlocks, AreNotCutByLengths) {
  AttentionProblem problem = causal_problem(256, 4, 2);
  problem.shape.batch = 3;
  problem.mask.set_query_lengths({256, 100, 201});
  problem.mask.set_kv_lengths({190, 100, 0});
  for (const auto& [layout, schedule] : kCuttable) {
    // The two ranges of a zigzag shard end at different columns of those gathered.
    const bool apart = layout == LayoutKind::zigzag && schedule == Schedule::allgather;
    const std::size_t gathered = schedule == Schedule::allgather ? 2 : 4;
    EXPECT_LE(expect_straight(problem, layout, schedule), apart ? 4U : gathered);
  }
}

// Calls for many short documents may cost more than one kernel that knows the mask.
TEST(StraightBlocks, AreCutOnlyWhereThatIsFaster) {
  AttentionProblem problem = causal_problem(256, 4, 2);
  const auto row = documents_of(32, 256);
  problem.mask.set_segments(1, row, row);
  PlanInput input = gpu_input(problem, sequence_operands(problem, 1, LayoutKind::contiguous));
  for (const auto& [latency, blocks] : {std::pair{1e-9, 8U}, std::pair{1.0, 1U}}) {
    for (auto& [name, cost] : input.prices.kernels) cost.call_latency = latency;
    EXPECT_EQ(make_rank_plan(input, Schedule::local, 0).all<Block>().size(), blocks);
  }
}

// Nothing is cut for a kernel that takes everything.
TEST(StraightBlocks, AKernelThatTakesEverythingGetsWholeBlocks) {
  AttentionProblem problem = causal_problem(256, 4, 2);
  const auto row = documents_of(32, 256);
  problem.mask.set_segments(1, row, row);
  for (const auto& [layout, schedule] : kCuttable) {
    const ShardedOperands operands = sequence_operands(problem, kRanks, layout);
    const Plan plan = make_plan(native_input(problem, operands), schedule);
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_LE(rank.all<Block>().size(), schedule == Schedule::ring ? 4U : 2U);
    }
  }
}

}  // namespace
}  // namespace annulus::ring
