#include <map>
#include <sstream>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <annulus/verification/random_problem.hpp>

namespace annulus::verification {
namespace {

TEST(RandomBackward, EveryDrawIsPlannedAndHasGradients) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (int index = 0; index < 200; ++index) {
      const RandomProblem drawn = draw_problem(9, index, ranks);
      if (!drawn.backward) {
        EXPECT_FALSE(drawn.draws_backward) << drawn.command;
        continue;
      }
      EXPECT_TRUE(drawn.problem.normalize_output) << drawn.command;
      EXPECT_FALSE(drawn.fills.key || drawn.fills.query) << drawn.command;
      const ring::ShardedOperands operands =
          ring::shard_operands(drawn.problem, drawn.mesh, drawn.layout);
      ring::PlanOptions options = *drawn.plan;
      options.grad_wire = drawn.backward->grad_wire;
      const ring::PlanInput input =
          ring::make_plan_input(drawn.problem, operands, {}, Place::host(),
                                ring::CostModel::cpu_core(), options, drawn.backward->request);
      EXPECT_NO_THROW(ring::check_schedule(input, drawn.backward->schedule)) << drawn.command;
    }
  }
}

TEST(RandomBackward, CoversTheWaysOfGradientsIn500Draws) {
  std::map<std::string, int> counts;
  int possible = 0;
  int wanted = 0;
  for (int index = 0; index < 500; ++index) {
    const RandomProblem drawn = draw_problem(1, index, 8);
    if (!drawn.backward) continue;
    ++possible;
    if (drawn.draws_backward) ++wanted;
    const BackwardCase& backward = *drawn.backward;
    ++counts[backward.schedule];
    ++counts[fmt::format("by {}", backward.implementation)];
    ++counts[fmt::format("LSE {}, added {}", backward.request.grad_lse, backward.request.adds)];
    if (backward.grad_wire == DType::bfloat16) ++counts["sent in bfloat16"];
    if (drawn.problem.mask.hides_any()) ++counts["mask"];
    EXPECT_EQ(backward.request.grad_sinks, drawn.problem.sinks.has_value());
    EXPECT_EQ(backward.request.grad_bias, drawn.problem.bias.has_value());
    if (drawn.problem.sinks) ++counts["sinks"];
    if (drawn.problem.dropout) ++counts["dropout"];
    if (drawn.problem.bias) ++counts["bias"];
    if (drawn.problem.dense_mask) ++counts["dense mask"];
  }
  EXPECT_GT(possible, 250);
  EXPECT_GT(wanted, possible * 2 / 5);
  EXPECT_LT(wanted, possible * 3 / 5);
  std::istringstream kinds(
      "local|ring|double_ring|allgather|ulysses|hybrid|pass_q|auto|by |by vanilla|"
      "LSE false, added false|LSE false, added true|LSE true, added false|LSE true, added true|"
      "mask|sinks|dropout|bias|dense mask|sent in bfloat16");
  for (std::string kind; std::getline(kinds, kind, '|');) EXPECT_GT(counts[kind], 10) << kind;
}

TEST(RandomBackward, VanillaIsForCpus) {
  for (int index = 0; index < 200; ++index) {
    const RandomProblem drawn = draw_problem(1, index, 4, Place::Kind::cuda);
    if (!drawn.backward) continue;
    EXPECT_EQ(drawn.backward->implementation, "") << drawn.command;
  }
}

// Kernels of GPUs that add in an order that varies compute only where that is allowed.
TEST(RandomBackward, OnGpusMostPlansAllowBitsToVaryAndSomePreferCudnn) {
  int varying = 0, preferring = 0;
  for (int index = 0; index < 200; ++index) {
    const RandomProblem drawn = draw_problem(1, index, 4, Place::Kind::cuda);
    varying += drawn.problem.repeats_bits({Place::Kind::cuda, 0}) ? 0 : 1;
    preferring += drawn.plan->preferred == "sdpa" ? 1 : 0;
    EXPECT_EQ(draw_problem(1, index, 4, Place::Kind::host).plan->preferred, "");
  }
  EXPECT_GT(varying, 120);
  EXPECT_LT(varying, 180);
  EXPECT_GT(preferring, 50);
  EXPECT_LT(preferring, 120);
}

}  // namespace
}  // namespace annulus::verification
