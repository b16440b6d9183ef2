#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/registry.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/used_share.hpp>

#include "cost/cost.hpp"
#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

constexpr std::int64_t kLength = 4096;

// A ring of two without a mask, in bfloat16, computed by one implementation on GPUs.
PlanInput backward_input(const AttentionProblem& problem, const ShardedOperands& operands,
                         const std::string& implementation = "flash_attn2",
                         const BackwardRequest& request = {}) {
  static const Registry registry = Registry::standard();
  return make_plan_input(problem, operands, {&registry.get(implementation)}, Place::cuda(0),
                         CostModel::hopper_nvlink(), PlanOptions::for_place(Place::cuda(0)),
                         request);
}

// Each content is summed by a launch of its own, which touches no other content of the buffers.
TEST(BackwardCosts, SumsMoveTheBytesOfTheirContents) {
  const AttentionProblem problem = unmasked_problem(kLength, 8, 2);
  PlanInput input = backward_input(problem, sequence_operands(problem, 2, LayoutKind::contiguous));
  input.prices.model.merge_bytes_per_second = 1;
  input.prices.model.launch_seconds = 0;
  const RankPlan plan = make_rank_plan(input, Schedule::ring, 0);
  const auto all_sums = [&] {
    double seconds = 0;
    for (const Reduce* reduce : plan.all<Reduce>()) {
      seconds += seconds_of(plan, *reduce, input.prices);
    }
    return seconds;
  };
  const double rows = kLength / 2.0 * 8 * 64 * sizeof(float);     // of dQ
  const double columns = kLength / 2.0 * 2 * 64 * sizeof(float);  // of dK, and of dV
  // dQ, dK, dV and the parts for the other rank are cleared. The parts that the other rank sends
  // are read and added. In the end, the results are read, and written in half as many bytes.
  EXPECT_DOUBLE_EQ(all_sums(), rows + 4 * columns + 2 * 3 * columns + 1.5 * (rows + 2 * columns));
  const double bytes = all_sums();
  input.prices.model.launch_seconds = 1;
  EXPECT_DOUBLE_EQ(all_sums(), bytes + (1 + 4) + 2 + 3);
}

// The only block of rank 0 whose columns are its own.
const BackwardBlock& own_block(const RankPlan& plan) {
  return *plan.all<BackwardBlock>().front();
}

// The part of the rate that is left for walks over this many rows, if no row is masked and one tile
// of keys serves `joined` query heads.
double kept(double rows, double joined) {
  return rows / (rows + 550 / joined);
}

// cuDNN computes a tile of keys for every query head.
TEST(BackwardCosts, ATileOfKeysServesAllQueryHeads) {
  for (const auto& [name, joined] : {std::pair("flash_attn2", 8), std::pair("sdpa", 1)}) {
    const AttentionProblem problem = unmasked_problem(1024, 32, 4);
    const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::contiguous);
    PlanInput input = backward_input(problem, operands, name);
    const RankPlan plan = make_rank_plan(input, Schedule::ring, 0);
    KernelCost& kernel = input.prices.kernels.at(name);
    kernel.call_latency = 0;
    const BackwardBlock& block = own_block(plan);
    ASSERT_EQ(block.columns.count, 512);
    const double busy = 512.0 / kTileRows * 32 / joined / kMultiprocessors;
    EXPECT_DOUBLE_EQ(seconds_of(plan, block, input.prices),
                     plan.backward_flops(block) /
                         (kernel.rate.clamped(512) * std::min(1.0, busy) * kept(512, joined)))
        << name;
  }
}

// Rates include the adding of gradients. Memory limits only very fast kernels.
TEST(BackwardCosts, GradientsAreAddedWhileTheKernelComputes) {
  const AttentionProblem problem = unmasked_problem(8192, 8, 8);
  PlanInput input = backward_input(problem, sequence_operands(problem, 2, LayoutKind::contiguous));
  const RankPlan plan = make_rank_plan(input, Schedule::ring, 0);
  const BackwardBlock& block = own_block(plan);
  KernelCost& kernel = input.prices.kernels.at("flash_attn2");
  const double flops = plan.backward_flops(block);
  kernel.rate = CostCurve::constant(1e14);
  EXPECT_DOUBLE_EQ(seconds_of(plan, block, input.prices),
                   kernel.call_latency + flops / (1e14 * kept(4096, 1)));
  kernel.rate = CostCurve::constant(1e20);
  const double numbers = 4096.0 * 8 * 64;  // of each operand and gradient of the block
  EXPECT_DOUBLE_EQ(seconds_of(plan, block, input.prices),
                   kernel.call_latency + input.prices.model.reading_seconds(2 * numbers * 2) +
                       input.prices.model.memory_seconds(3 * numbers * 2 * sizeof(float)));
}

// Each head adds to the gradient of a bias, also to one that all heads share.
TEST(BackwardCosts, GradientsOfASharedBiasAreAddedByEachHead) {
  std::vector<double> more;
  for (const std::int64_t of_heads : {8, 1}) {
    AttentionProblem problem = unmasked_problem(kLength, 8, 2);
    problem.bias = Extents{1, of_heads, kLength, kLength};
    const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::contiguous);
    const auto seconds = [&](bool grad_bias) {
      const PlanInput input =
          backward_input(problem, operands, "flash_attn2", {false, false, false, grad_bias});
      const RankPlan plan = make_rank_plan(input, Schedule::ring, 0);
      return seconds_of(plan, own_block(plan), input.prices);
    };
    more.push_back(seconds(true) - seconds(false));
  }
  EXPECT_GT(more[0], 0);
  EXPECT_NEAR(more[1], more[0], 1e-9 * more[0]);
}

// Tiles are computed from the longest to the shortest, so the last ones fill the gaps. If there are
// few tiles, only the longest one counts.
TEST(BackwardCosts, TilesOfACausalMaskEndTogetherIfThereAreTwoEach) {
  const auto share = [](std::int64_t rows, std::int64_t heads) {
    return used_share_backward(Place::Kind::cuda, {rows, rows, heads, 1, rows * rows / 2}, 1, 1);
  };
  const auto without_edges = [](double rows) { return rows / 2 / (rows / 2 + 550 + 250); };
  EXPECT_DOUBLE_EQ(share(kTileRows * 4, 33), without_edges(kTileRows * 4) / 2);
  EXPECT_DOUBLE_EQ(share(kTileRows * 4, 66), without_edges(kTileRows * 4));
  EXPECT_DOUBLE_EQ(share(kTileRows * 64, 66), without_edges(kTileRows * 64));
  EXPECT_EQ(used_share_backward(Place::Kind::host, {512, 512, 1, 1, 512 * 256}, 1, 1), 1);
}

}  // namespace
}  // namespace annulus::ring
