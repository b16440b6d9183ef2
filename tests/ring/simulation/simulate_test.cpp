#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/simulate.hpp>
#include <annulus/verification/random_problem.hpp>

#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

constexpr double kEndless = 1e30;

AttentionProblem problem_of(std::int64_t length, bool causal) {
  AttentionProblem problem = causal_problem(length);
  problem.mask.set_causal(causal);
  return problem;
}

// Kernels of `flops` operations a second, messages of the given time, and nothing else.
Prices plain_prices(const std::string& transport, double flops, const CostCurve& messages) {
  const KernelCost kernel{"test", CostCurve::constant(flops), 0};
  return {{.source = "test",
           .kernels = {},
           .merge_bytes_per_second = kEndless,
           .transports = {{transport, messages}},
           .transport = transport},
          {{"native", kernel}, {"sdpa", kernel}, {"flash_attn2", kernel}}};
}

Block& first_block(RankPlan& plan) {
  for (Task& task : plan.tasks) {
    if (auto* block = std::get_if<Block>(&task.work)) return *block;
  }
  throw std::logic_error("a plan without blocks");
}

TEST(Simulate, OneRankTakesItsComputeTime) {
  const AttentionProblem problem = problem_of(1024, true);
  const Plan plan = sequence_plan(problem, 1, LayoutKind::contiguous, Schedule::local);
  const Prices prices = plain_prices("mpi", 1e9, CostCurve::constant(1));
  EXPECT_NEAR(predicted_seconds(plan, prices),
              forward_flops(problem.shape, 1024.0 * 1025 / 2) / 1e9, 1e-12);
}

TEST(Simulate, SlowLinksAreExposedAndFastOnesHide) {
  const Plan plan = sequence_plan(problem_of(4096, true), 4, LayoutKind::zigzag, Schedule::ring);
  Prices prices = plain_prices("mpi", 5e10, CostCurve::constant(1));
  prices.model = CostModel::cpu_core();
  prices.model.transports.at("mpi") = CostCurve::transfer(1e-12, 1e15);
  for (const RankTimeline& rank : simulate(plan, prices)) EXPECT_NEAR(rank.exposed, 0, 1e-4);
  prices.model.transports.at("mpi") = CostCurve::transfer(1e-12, 1e6);
  for (const RankTimeline& rank : simulate(plan, prices)) {
    EXPECT_GT(rank.exposed, 0.5 * rank.transfer);
    EXPECT_GE(rank.finish, rank.compute);
  }
}

TEST(Simulate, UsesTheCurveOfTheTransportInUse) {
  const Plan plan =
      sequence_plan(problem_of(4096, false), 4, LayoutKind::contiguous, Schedule::ring);
  const auto bytes = static_cast<double>(plan.ranks[0].all<Exchange>()[0]->receives.at(0).bytes);
  Prices prices = plain_prices("peer", 1e12, CostCurve::constant(1));
  prices.model = CostModel::hopper_nvlink();
  for (const char* transport : {"peer", "nccl"}) {
    prices.model.use_transport(transport);
    // Three hops of one message each.
    EXPECT_NEAR(simulate(plan, prices)[0].transfer,
                3 * prices.model.transports.at(transport).extended(bytes), 1e-12);
  }
}

// Four ranks in a ring, whose first blocks take as long as four of the others; a message takes as
// long as two of these blocks.
TEST(Simulate, TransfersOfGpusRunAheadWhereMemoryAllows) {
  const auto blocks = [](const std::string& transport, bool direct, bool prefetch) {
    Plan plan =
        sequence_plan(problem_of(4096, false), 4, LayoutKind::contiguous, Schedule::ring,
                      {.direct = direct, .prefetch_bytes = prefetch ? std::int64_t{1} << 30 : 0});
    const Block& block = *plan.ranks[0].all<Block>().at(1);
    const double flops =
        2.0 * static_cast<double>(block.pairs) * static_cast<double>(block.heads.count) * 128;
    for (RankPlan& rank : plan.ranks) first_block(rank).pairs *= 4;
    return predicted_seconds(plan, plain_prices(transport, flops, CostCurve::constant(2)));
  };
  for (const bool direct : {true, false}) {
    for (const bool prefetch : {true, false}) {
      // A hop begins when the blocks before it are done: 4 + 2 + 2 + 1.
      EXPECT_NEAR(blocks("mpi", direct, prefetch), 9, 1e-9);
    }
    for (const char* transport : {"nccl", "peer"}) {
      // Arrivals at 2, 4 and 6, when the blocks before them are done or nearly so.
      EXPECT_NEAR(blocks(transport, direct, true), 7, 1e-9);
      // The third hop takes the memory of the first one, whose block ends at 5: arrival at 7.
      EXPECT_NEAR(blocks(transport, direct, false), 8, 1e-9);
    }
  }
}

// A one-sided receiver need not wait until its peer can receive, too.
TEST(Simulate, WhoTakesDoesNotWaitForTheOtherSideToReceive) {
  Plan plan = sequence_plan(problem_of(4096, false), 4, LayoutKind::contiguous, Schedule::ring,
                            {.direct = true});
  Block& first = first_block(plan.ranks[1]);
  const double flops =
      2.0 * static_cast<double>(first.pairs) * static_cast<double>(first.heads.count) * 128;
  // Blocks of one second, but rank 1 begins with one of twenty. Its third hop takes the memory that
  // its second block uses until 21.
  first.pairs *= 20;
  const auto finish = [&](const char* transport, std::size_t rank) {
    return simulate(plan, plain_prices(transport, flops, CostCurve::constant(2)))[rank].finish;
  };
  // Rank 0 gets columns of rank 1 in its third hop: by 6, or when that one comes to its own, by 23.
  EXPECT_NEAR(finish("peer", 0), 7, 1e-9);
  EXPECT_NEAR(finish("nccl", 0), 24, 1e-9);
  for (const char* transport : {"peer", "nccl"}) EXPECT_NEAR(finish(transport, 1), 24, 1e-9);
}

TEST(Simulate, PackingComesFirstAndCombiningLast) {
  const AttentionProblem problem = problem_of(4096, false);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
  const Plan plan = make_plan(gpu_input(problem, operands), Schedule::ring);
  const double shard = 1024.0 * 64 * 2;  // bytes of a head
  Prices prices = plain_prices("peer", kEndless, CostCurve::constant(1e-3));
  prices.model.merge_bytes_per_second = 1e9;
  const double packing = 2 * (2 * 2 * shard) / 1e9;      // K and V of two heads: read, written
  const double reading = 2 * 2 * shard / 1e9;            // the same by each of four kernels
  const double combining = (4 + 1) * (8 * shard) / 1e9;  // four results read, one written
  for (const RankTimeline& rank : simulate(plan, prices)) {
    EXPECT_NEAR(rank.compute, packing + 4 * reading + combining, 1e-12);
    EXPECT_NEAR(rank.finish, packing + 3e-3 + reading + combining, 1e-12);
    EXPECT_NEAR(rank.exposed, 3e-3 - 3 * reading, 1e-12);
  }
}

// For any plan, no rank waits without a reason, and none gains by waiting for both sides.
TEST(Simulate, RandomProblemsFinishInTime) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (int index = 0; index < 60; ++index) {
      const verification::RandomProblem drawn = verification::draw_problem(13, index, ranks);
      SCOPED_TRACE(drawn.command);
      const ShardedOperands operands = shard_operands(drawn.problem, drawn.mesh, drawn.layout);
      const PlanInput input = native_input(drawn.problem, operands, *drawn.plan);
      const Schedule schedule = choose_schedule(input, drawn.schedule).schedule;
      const Plan plan = make_plan(input, schedule);
      const CostCurve messages = CostCurve::transfer(1e-6, 1e9);
      const double mpi = predicted_seconds(plan, plain_prices("mpi", 1e9, messages));
      const double nccl = predicted_seconds(plan, plain_prices("nccl", 1e9, messages));
      const double peer = predicted_seconds(plan, plain_prices("peer", 1e9, messages));
      // Messages that run ahead may slow down others on their links, but not by much.
      EXPECT_LE(nccl, mpi * 1.1);
      EXPECT_LE(peer, mpi * 1.1);
      for (const char* transport : {"mpi", "nccl", "peer"}) {
        const Prices free = plain_prices(transport, 1e9, CostCurve::constant(1e-30));
        double work = 0;
        for (const RankTimeline& rank : simulate(plan, free)) work = std::max(work, rank.compute);
        const double finish = predicted_seconds(plan, free);
        EXPECT_GE(finish, work);
        if (std::string(transport) == "peer" && schedule == Schedule::allgather) {
          EXPECT_NEAR(finish, work, 1e-9);
        }
      }
    }
  }
}

// Ranks that are left out are assumed to be as far as the ranks that they exchange with.
TEST(Simulate, ASampleOfEqualRanksTakesAsLongAsAllOfThem) {
  const AttentionProblem problem = problem_of(4096, false);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  const PlanInput input = native_input(problem, operands);
  for (const char* transport : {"mpi", "nccl", "peer"}) {
    const Prices prices = plain_prices(transport, 1e9, CostCurve::transfer(1e-3, 1e8));
    const double all = predicted_seconds(make_plan(input, Schedule::ring), prices);
    EXPECT_NEAR(predicted_seconds(make_plan(input, Schedule::ring, {0, 3}), prices), all,
                1e-9 * all);
  }
}

// A kernel that awaits its columns loses only the time that its first tiles wait.
TEST(Simulate, ABlockWaitsForColumnsThatItDoesNotHaveYet) {
  const AttentionProblem problem = causal_problem(8192, 64, 8);
  const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::zigzag);
  const Plan plan = make_plan(flash_input(problem, operands), Schedule::allgather);
  ASSERT_EQ(plan.ranks[0].all<Block>().size(), 1U);
  ASSERT_EQ(plan.ranks[0].all<Block>()[0]->arrivals.size(), 1U);
  ASSERT_EQ(plan.ranks[0].all<Exchange>().at(0)->receives.size(), 2U);
  const auto finish = [&](double message) {
    // All blocks take a second.
    const Prices prices =
        plain_prices("peer", plan.ranks[0].work() * 4 * 64, CostCurve::constant(message));
    return simulate(plan, prices)[0].finish;
  };
  EXPECT_NEAR(finish(1e-6), 1, 1e-6);
  // 132 tiles run at a time, of 64 heads × 32 tiles. The longest take twice the mean, half of it
  // for the rank's own columns.
  const double first_tiles = 2 * 132.0 / (64 * 32) / 2;
  EXPECT_NEAR(finish(first_tiles), 1, 1e-3);
  EXPECT_NEAR(finish(first_tiles + 0.5), 1.5, 1e-3);
}

double seconds_alone(const AttentionProblem& problem, double flops) {
  Prices prices = plain_prices("mpi", flops, CostCurve::constant(1));
  prices.model.merge_bytes_per_second = 1e9;
  return predicted_seconds(sequence_plan(problem, 1, LayoutKind::contiguous, Schedule::local),
                           prices);
}

// Two tiles of the 132 that a GPU computes at once; a CPU rank is busy with any block.
TEST(Simulate, AFewHeadsKeepPartOfAGpuBusy) {
  AttentionProblem problem = unmasked_problem(256, 1, 1);
  const Plan plan = sequence_plan(problem, 1, LayoutKind::contiguous, Schedule::local);
  Prices prices = plain_prices("peer", 1e9, CostCurve::constant(1));
  const double full = predicted_seconds(plan, prices);
  prices.model.device = Place::Kind::cuda;
  EXPECT_NEAR(predicted_seconds(plan, prices), full * 132 / 2, 1e-9);
}

// Under a causal mask the longest tile takes twice the mean, which the others wait for if there are
// few. On a CPU, threads divide the tiles.
TEST(Simulate, FewTilesOfACausalMaskDoNotEndTogether) {
  for (const auto& [rows, heads, rounds] :
       {std::tuple{4096, 1, 1.0}, {256, 66, 1.0}, {256, 132, 2.0}, {512, 132, 4.0}}) {
    const Plan plan = sequence_plan(causal_problem(rows, heads, heads), 1, LayoutKind::contiguous,
                                    Schedule::local);
    Prices prices = plain_prices("peer", 1e9, CostCurve::constant(1));
    const double even = predicted_seconds(plan, prices);
    prices.model.device = Place::Kind::cuda;
    const double busy = std::min(1.0, rows / 128 * heads / 132.0);
    const double longest = 2.0 * rows / (rows + 1);
    EXPECT_NEAR(predicted_seconds(plan, prices) * busy / even,
                1 + (longest - 1) / (rounds * rounds), 1e-9)
        << rows << " " << heads;
  }
}

TEST(Simulate, AFewRowsTakeAsLongAsReadingTheirKeys) {
  AttentionProblem problem = problem_of(1, false);
  problem.shape.kv_length = 1 << 16;
  const double bytes = (1 << 16) * 2 * (64 + 64) * 2.0;  // two key/value heads, bfloat16
  EXPECT_NEAR(seconds_alone(problem, kEndless), bytes / 1e9, 1e-5);
  // GPUs read faster than they merge.
  const Plan plan = sequence_plan(problem, 1, LayoutKind::contiguous, Schedule::local);
  Prices prices = plain_prices("peer", kEndless, CostCurve::constant(1));
  prices.model.merge_bytes_per_second = 1e9;
  prices.model.device = Place::Kind::cuda;
  EXPECT_NEAR(predicted_seconds(plan, prices), 0.75 * bytes / 1e9, 1e-5);
  prices.model.read_bytes_per_second = 3e9;  // if that was measured
  EXPECT_NEAR(predicted_seconds(plan, prices), bytes / 3e9, 1e-5);
  const double flops = forward_flops(problem.shape, 1 << 16);
  EXPECT_NEAR(seconds_alone(problem, 1e9), flops / 1e9, 1e-5);
}

// By a kernel that shares out the keys of each head. A masked pair sends the block to the other one
// unless bands and lengths are for the kernel too; it then reads what is visible.
TEST(Simulate, OnlyKernelsForFewRowsReadWithTheWholeGpu) {
  AttentionProblem problem = problem_of(4, false);
  problem.shape.kv_length = 1 << 16;
  const double reading = 0.75 * (1 << 16) * 2 * (64 + 64) * 2.0 / 1e9;
  const double computing = forward_flops(problem.shape, 4.0 * (1 << 16)) / 1e9 * 132 / 8;
  bool banded = false;
  const auto seconds = [&banded](const AttentionProblem& asked, std::int64_t few_rows,
                                 double rate = kEndless) {
    const Plan plan = sequence_plan(asked, 1, LayoutKind::contiguous, Schedule::local);
    Prices prices = plain_prices("peer", 1e9, CostCurve::constant(1));
    for (auto& [name, kernel] : prices.kernels) {
      kernel.few_rows = {.most = few_rows, .always = few_rows, .rate = rate, .banded = banded};
    }
    prices.model.merge_bytes_per_second = 1e9;
    prices.model.device = Place::Kind::cuda;
    return predicted_seconds(plan, prices);
  };
  ASSERT_EQ(problem.shape.heads / problem.shape.kv_heads, 4);
  EXPECT_NEAR(seconds(problem, 16), reading, 1e-4);
  EXPECT_NEAR(seconds(problem, 15), computing, 1e-4);
  EXPECT_NEAR(seconds(problem, 16, 1e10), forward_flops(problem.shape, 4.0 * (1 << 16)) / 1e10,
              1e-4);
  problem.mask.set_causal(true);
  problem.mask.set_offset((1 << 16) - 4);
  EXPECT_GT(seconds(problem, 16), 0.9 * computing);
  banded = true;
  EXPECT_NEAR(seconds(problem, 16), reading, 1e-4);
  problem.mask.set_kv_lengths({1 << 14});
  EXPECT_NEAR(seconds(problem, 16), reading / 4, 1e-4);
}

TEST(Simulate, BiasAndDenseMaskAreReadWhereTheyAreSeen) {
  for (const bool causal : {true, false}) {
    const AttentionProblem plain = problem_of(1024, causal);
    const double pairs = causal ? 1024.0 * 1025 / 2 : 1024.0 * 1024;
    const auto added = [&](const Extents& sizes, bool is_bias) {
      AttentionProblem problem = plain;
      (is_bias ? problem.bias : problem.dense_mask) = sizes;
      return (seconds_alone(problem, kEndless) - seconds_alone(plain, kEndless)) * 1e9;
    };
    EXPECT_NEAR(added({1, 8, 1024, 1024}, true), 8 * pairs * 4, 1);
    EXPECT_NEAR(added({1, 8, 1024, 1024}, false), 8 * pairs, 1);
    EXPECT_NEAR(added({1, 1, 1024, 1024}, true), pairs * 4, 1);
    EXPECT_NEAR(added({1, 8, 1, 1024}, true), 8 * pairs * 4 / 1024, 1);
    EXPECT_NEAR(added({1, 8, 1024, 1}, true), 8 * pairs * 4 / 1024, 1);
  }
}

TEST(Simulate, TasksThatWaitForEachOtherAreAnError) {
  Plan plan = sequence_plan(problem_of(1024, false), 2, LayoutKind::contiguous, Schedule::ring);
  for (std::size_t t = 0; t < plan.ranks[0].tasks.size(); ++t) {
    Task& task = plan.ranks[0].tasks[t];
    if (std::holds_alternative<Exchange>(task.work)) {
      task.after.push_back({static_cast<int>(plan.ranks[0].tasks.size()) - 1, Stage::done});
    }
  }
  const Prices prices = plain_prices("nccl", 1e9, CostCurve::constant(1));
  EXPECT_THROW((void)simulate(plan, prices), InternalError);
}

}  // namespace
}  // namespace annulus::ring
