// Tests of what plans compute, send, hold and report.
#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/ring/planner.hpp>
#include <annulus/verification/random_problem.hpp>

#include "tests/ring/plan_player.hpp"
#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

TEST(Plan, EveryVisiblePairIsComputedOnceUnderEveryLayoutScheduleAndMask) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const LayoutKind layout :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::balanced}) {
      for (const Schedule schedule : kSchedules) {
        for (int mask = 0; mask < 8; ++mask) {
          AttentionProblem problem = causal_problem(37, 4, 2);
          Mask& m = problem.mask;
          m.set_causal(mask != 0 && mask != 4);
          if (mask == 2) m.set_window(5, -1);
          if (mask == 3) m.set_offset(-9);
          if (mask == 4) m.set_window(4, 3);
          if (mask == 5) {
            const std::vector<std::int32_t> cu{0, 1, 13, 13, 30, 37};
            const auto ids = segments_from_cu_seqlens(cu, 37);
            m.set_segments(1, ids, ids);
          }
          if (mask == 6) m.set_block_mask(BlockMask::random(37, 37, 4, 0.3, 1, {5, 7}));
          if (mask == 7) m.set_block_mask(BlockMask::strided(37, 37, 1, 3, {4, 4}));
          for (const bool few : {true, false}) {
            SCOPED_TRACE(testing::Message()
                         << ranks << " ranks, " << name_of(layout) << ", " << name_of(schedule)
                         << ", mask " << to_string(m) << (few ? ", few heads at a time" : ""));
            const ShardedOperands operands = sequence_operands(problem, ranks, layout);
            PlanOptions options{.gather_bytes = few ? 1 : std::int64_t{1} << 30,
                                .result_bytes = few ? 1 : 0,
                                .head_group_bytes = few ? 1 : std::int64_t{1} << 30};
            if (ranks % 2 == 0) options.inner_size = options.ulysses_degree = few ? 2 : ranks / 2;
            const unsigned seed = static_cast<unsigned>(ranks * 10 + mask);
            expect_valid(make_plan(native_input(problem, operands, options), schedule), operands,
                         seed);
            // As for a GPU: cut into straight blocks where that is faster.
            PlanOptions on_gpus = options;
            on_gpus.direct = few;
            on_gpus.prefetch_bytes = few ? 0 : std::int64_t{1} << 30;
            on_gpus.lse_dtype = DType::float32;
            expect_valid(make_plan(gpu_input(problem, operands, on_gpus), schedule), operands,
                         seed);
            // A kernel that continues states.
            expect_valid(make_plan(flash_input(problem, operands, on_gpus), schedule), operands,
                         seed);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Plan, RingsByHeadsKeepPartialResultsSmall) {
  const AttentionProblem problem = causal_problem(4096, 8, 4);
  PlanOptions options;
  // Three partial results in bfloat16 beside the output may take what the output takes in float32.
  options.result_bytes = 1;
  const Plan plan = sequence_plan(problem, 4, LayoutKind::zigzag, Schedule::ring, options);
  for (const RankPlan& rank : plan.ranks) {
    const double values = static_cast<double>(rank.local.query_length * problem.shape.value_dim);
    std::int64_t most = 0;
    for (const Block* block : rank.all<Block>()) most = std::max(most, block->heads.count);
    EXPECT_LE(3 * values * static_cast<double>(most) * 2, values * 8 * 4);
    EXPECT_EQ(rank.all<Exchange>().size(), 6U);  // three hops, twice
  }
}

TEST(Plan, RandomProblemsAreComputedCompletely) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (int index = 0; index < 60; ++index) {
      const verification::RandomProblem drawn = verification::draw_problem(7, index, ranks);
      // Every pair is looked at: the few long problems would take a minute.
      constexpr std::int64_t kMaximumPairs = 200 * 200;
      const AttentionShape& shape = drawn.problem.shape;
      if (shape.query_length * shape.kv_length > kMaximumPairs) continue;
      SCOPED_TRACE(drawn.command + ": " + to_string(drawn.problem.shape) + ", mask " +
                   to_string(drawn.problem.mask));
      const ShardedOperands operands = shard_operands(drawn.problem, drawn.mesh, drawn.layout);
      const PlanInput input = native_input(drawn.problem, operands, *drawn.plan);
      const Schedule schedule = choose_schedule(input, drawn.schedule).schedule;
      const Plan plan = make_plan(input, schedule);
      expect_valid(plan, operands, static_cast<unsigned>(index));
      expect_valid(make_plan(gpu_input(drawn.problem, operands, *drawn.plan), schedule), operands,
                   static_cast<unsigned>(index));
      // Rows are rounded by whoever completes them, whatever another call costs.
      AttentionProblem half = drawn.problem;
      half.dtype = DType::bfloat16;
      PlanInput rounding = flash_input(half, operands);
      rounding.prices.model.merge_bytes_per_second = 1;
      expect_valid(make_plan(rounding, schedule), operands, static_cast<unsigned>(index));
      // Kernels that round, that continue a state and that do neither, in one plan: every other
      // block is refused to the one that would take it first.
      const PlanInput straight = gpu_input(half, operands, *drawn.plan);
      PlanOptions options = *drawn.plan;
      options.lse_dtype = DType::float32;
      PlanInput mixed = make_plan_input(
          half, operands, {straight.candidates[0], rounding.candidates[0], straight.candidates[1]},
          Place::cuda(0), CostModel::hopper_nvlink(), options);
      mixed.prices.model.merge_bytes_per_second = index % 2 == 0 ? 1 : 3.3e12;
      int taken = 0;
      for (const RankPlan& rank : make_plan(mixed, schedule).ranks) {
        for (const Block* block : rank.all<Block>()) {
          if (++taken % 2 == 0) continue;
          refuse(mixed,
                 {{rank.implementation_of(*block), block->row_positions, block->column_positions,
                   rank.global(block->batches), block->heads.count, block->full, "busy"}});
        }
      }
      expect_valid(make_plan(mixed, schedule), operands, static_cast<unsigned>(index));
      // On nodes of two ranks.
      PlanInput apart = gpu_input(drawn.problem, operands, *drawn.plan);
      for (int r = 0; r < ranks; ++r) apart.prices.node_of_rank.push_back(r / 2);
      expect_valid(make_plan(apart, schedule), operands, static_cast<unsigned>(index));
      const RankPlan alone = make_rank_plan(input, schedule, ranks - 1);
      EXPECT_EQ(alone.work(), plan.ranks.back().work());
      EXPECT_EQ(alone.bytes_sent(), plan.ranks.back().bytes_sent());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Plan, ZigzagAndStripedBalanceCausalWorkAndContiguousDoesNot) {
  const AttentionProblem problem = causal_problem(1 << 20);
  EXPECT_LT(sequence_plan(problem, 8, LayoutKind::zigzag, Schedule::ring).imbalance(), 1e-9);
  EXPECT_LT(sequence_plan(problem, 8, LayoutKind::striped, Schedule::ring).imbalance(), 1e-3);
  // The last of P contiguous chunks does (2P − 1)/P times the mean.
  EXPECT_NEAR(sequence_plan(problem, 8, LayoutKind::contiguous, Schedule::ring).imbalance(),
              7.0 / 8, 1e-3);
}

TEST(Plan, WorkOfAllRanksIsTheWorkOfTheProblem) {
  const AttentionProblem problem = causal_problem(1000, 8, 2);
  for (const LayoutKind layout :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    const Plan plan = sequence_plan(problem, 7, layout, Schedule::ring);
    double work = 0;
    for (const RankPlan& rank : plan.ranks) work += rank.work();
    EXPECT_EQ(work, 8.0 * 1000 * 1001 / 2);
  }
}

TEST(Plan, CausalContiguousRingSendsNothingToEarlierRanks) {
  const Plan plan = sequence_plan(causal_problem(64), 4, LayoutKind::contiguous, Schedule::ring);
  const std::int64_t block = 16 * 2 * (64 + 64) * 2;  // tokens · kv heads · (D + Dv) · bytes
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(plan.ranks[static_cast<std::size_t>(rank)].bytes_received(), rank * block);
    EXPECT_EQ(plan.ranks[static_cast<std::size_t>(rank)].all<Block>().size(), rank + 1U);
  }
}

TEST(Plan, ZigzagCausalRanksGetOnlyTheFirstChunkOfEarlierOnes) {
  const Plan plan = sequence_plan(causal_problem(64), 4, LayoutKind::zigzag, Schedule::ring);
  const std::int64_t chunk = 8 * 2 * (64 + 64) * 2;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(plan.ranks[static_cast<std::size_t>(rank)].bytes_received(),
              (rank + 2 * (3 - rank)) * chunk);
    const auto blocks = plan.ranks[static_cast<std::size_t>(rank)].all<Block>();
    EXPECT_LE(blocks.size(), 4U);
    for (std::size_t i = 1; i < blocks.size(); ++i) EXPECT_TRUE(blocks[i]->full);
  }
}

TEST(Plan, WindowBoundsWhatTravels) {
  AttentionProblem problem = causal_problem(1 << 16);
  const Plan whole = sequence_plan(problem, 4, LayoutKind::contiguous, Schedule::ring);
  problem.mask.set_window(4095, 0);
  const Plan windowed = sequence_plan(problem, 4, LayoutKind::contiguous, Schedule::ring);
  const std::int64_t slot = 2 * (64 + 64) * 2;
  EXPECT_EQ(windowed.ranks[0].bytes_received(), 0);
  for (std::size_t rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(windowed.ranks[rank].bytes_received(), 4095 * slot);
    EXPECT_LT(windowed.ranks[rank].work(), whole.ranks[rank].work());
  }
}

TEST(Plan, RingNeverHoldsMoreThanTwoReceiveBuffersOfTheLocalSize) {
  for (const LayoutKind layout :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    AttentionProblem problem = unmasked_problem(1003);
    const Plan plan = sequence_plan(problem, 5, layout, Schedule::ring);
    for (const RankPlan& rank : plan.ranks) {
      int receive = 0;
      std::set<int> received;
      for (const Exchange* exchange : rank.all<Exchange>()) {
        for (const Transfer& transfer : exchange->receives) received.insert(transfer.buffer);
      }
      for (const int buffer : received) {
        if (rank.buffer(buffer).reuses >= 0) continue;
        ++receive;
        EXPECT_LE(rank.buffer(buffer).tokens.count, 201 + 1);
      }
      EXPECT_EQ(receive, 2);
    }
  }
}

TEST(Plan, AllgatherByHeadGroupsBoundsMemory) {
  const AttentionProblem problem = causal_problem(1024, 16, 8);
  PlanOptions options;
  const std::int64_t per_head = 1024 * (64 + 64) * 2;
  options.gather_bytes = 2 * per_head;
  const Plan plan = sequence_plan(problem, 4, LayoutKind::zigzag, Schedule::allgather, options);
  const std::int64_t local = 256 * 8 * (64 + 64) * 2;
  for (const RankPlan& rank : plan.ranks) {
    EXPECT_EQ(rank.all<Exchange>().size(), 4U);  // groups of two heads
    EXPECT_LE(rank.buffer_bytes(BufferKind::exchange), local + 2 * options.gather_bytes);
  }
}

// More pairs of segment runs than the mask counts one by one.
TEST(Plan, ABoundedCountNeverPassesForFullVisibility) {
  AttentionProblem problem = causal_problem(1024, 1, 1);
  std::vector<std::int32_t> ids(1024);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 2);
  for (const bool causal : {false, true}) {
    problem.mask = Mask();
    problem.mask.set_causal(causal);
    problem.mask.set_segments(1, ids, ids);
    for (const int ranks : {1, 2, 4}) {
      for (const RankPlan& rank :
           sequence_plan(problem, ranks, LayoutKind::contiguous, Schedule::ring).ranks) {
        for (const Block* block : rank.all<Block>()) EXPECT_FALSE(block->full);
      }
    }
  }
}

TEST(Plan, ReplicatedQueryAgainstShardedKeysIsComplete) {
  AttentionProblem problem = causal_problem(40, 4, 2);
  problem.shape.query_length = 1;
  problem.mask.set_offset(39);
  const ShardedOperands operands =
      shard_operands(problem, MeshShape({{"sp", 4}}),
                     {PartitionSpec(), PartitionSpec::parse("-,sp"), LayoutKind::contiguous, 1});
  expect_valid(make_plan(native_input(problem, operands), Schedule::ring), operands);
}

TEST(Plan, JsonCarriesEveryRankAndTask) {
  const Plan plan = sequence_plan(causal_problem(64), 4, LayoutKind::zigzag, Schedule::ring);
  const auto json = nlohmann::json::parse(to_json(plan));
  EXPECT_EQ(json.at("version"), 3);
  EXPECT_EQ(json.at("schedule"), "ring");
  EXPECT_EQ(json.at("layout"), "zigzag");
  ASSERT_EQ(json.at("ranks").size(), 4U);
  for (std::size_t r = 0; r < 4; ++r) {
    const auto& rank = json.at("ranks")[r];
    const std::vector<Task>& tasks = plan.ranks[r].tasks;
    ASSERT_EQ(rank.at("tasks").size(), tasks.size());
    EXPECT_EQ(rank.at("bytes_received"), plan.ranks[r].bytes_received());
    EXPECT_EQ(rank.at("buffers").size(), plan.ranks[r].buffers.size());
    for (std::size_t t = 0; t < tasks.size(); ++t) {
      constexpr std::array kKinds{"copy", "exchange", "block", "reduce"};
      EXPECT_EQ(rank.at("tasks")[t].at("kind"), kKinds.at(tasks[t].work.index()));
      EXPECT_EQ(rank.at("tasks")[t].at("after").size(), tasks[t].after.size());
      if (const auto* block = std::get_if<Block>(&tasks[t].work)) {
        EXPECT_EQ(rank.at("tasks")[t].at("implementation"), "native");
        EXPECT_EQ(rank.at("tasks")[t].at("result").at("lse"), block->result.lse);
      }
    }
  }
}

TEST(Plan, TextShowsTheTasksOfTheRanksAskedFor) {
  const Plan plan = sequence_plan(causal_problem(64), 4, LayoutKind::zigzag, Schedule::ring);
  EXPECT_EQ(to_text(plan).find("step 0"), std::string::npos);
  const std::string text = to_text(plan, 2);
  EXPECT_NE(text.find("\nrank 1\n"), std::string::npos);
  EXPECT_EQ(text.find("\nrank 2\n"), std::string::npos);
  EXPECT_NE(text.find("compute rows 0:8+56:64 x columns 0:8+56:64"), std::string::npos);
  for (const char* part : {"by native", "reduce (softmax) into buffer 3",
                           "send to rank 1: key/value", "copy key from buffer 1", "; after "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
}

// Everything continues one state, and where the last block covers all rows nothing is reduced.
TEST(Plan, StatesAreContinuedWithoutMerging) {
  for (const bool causal : {true, false}) {
    AttentionProblem problem = causal_problem(1024, 8, 2);
    problem.mask.set_causal(causal);
    const PlanInput input = flash_input(problem, sequence_operands(problem, 4, LayoutKind::zigzag));
    for (const RankPlan& rank : make_plan(input, Schedule::ring).ranks) {
      const std::vector<const Block*> blocks = rank.all<Block>();
      EXPECT_FALSE(blocks.front()->state.has_value());
      for (std::size_t i = 1; i < blocks.size(); ++i) EXPECT_TRUE(blocks[i]->state.has_value());
      const std::vector<const Reduce*> reductions = rank.all<Reduce>();
      // The last hop of the last rank brings what all its rows see.
      EXPECT_EQ(reductions.size(), causal && rank.rank < 3 ? 1U : 0U);
      for (const Reduce* reduce : reductions) EXPECT_EQ(reduce->parts.size(), 1U);
      EXPECT_FALSE(rank.reduces_rounded());
    }
    // Alone, a block is rounded where it is computed.
    const ShardedOperands whole = sequence_operands(problem, 1, LayoutKind::contiguous);
    const RankPlan local = make_rank_plan(flash_input(problem, whole), Schedule::local, 0);
    EXPECT_TRUE(local.all<Reduce>().empty());
    EXPECT_EQ(local.buffer_bytes(BufferKind::local), 0);
  }
}

// Under a causal mask, a rank's first chunk is complete before its last one is: each is rounded by
// the block that completes it, and only the second one has a state in float32.
TEST(Plan, RowsAreRoundedWhereTheyAreComplete) {
  AttentionProblem problem = causal_problem(1 << 13, 64, 8, 128);
  for (const int ranks : {2, 4}) {
    const ShardedOperands operands = sequence_operands(problem, ranks, LayoutKind::zigzag);
    const Plan plan = make_plan(flash_input(problem, operands), Schedule::ring);
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_TRUE(rank.all<Reduce>().empty());
      std::int64_t rounded = 0;
      for (const Block* block : rank.all<Block>()) {
        if (rank.buffer(block->result.output.buffer).kind == BufferKind::caller) {
          rounded += block->rows.count;
        }
      }
      EXPECT_EQ(rounded, rank.local.query_length);
    }
  }
}

}  // namespace
}  // namespace annulus::ring
