#include <cstddef>
#include <memory>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/prices.hpp>
#include <annulus/ring/simulate.hpp>

#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const Registry& registry() {
  static const Registry all = Registry::standard();
  return all;
}

// The cost of flash_attn2 for causal_problem(), bfloat16 D = 64, if only these classes are
// measured.
// The rate of the n-th, from 1 on, is n, and its latency 0.n.
KernelCost price(const std::vector<ProblemClass>& measured,
                 const AttentionProblem& problem = causal_problem(1024)) {
  CostModel model = CostModel::hopper_nvlink();
  double number = 0;
  for (const ProblemClass& one : measured) {
    ++number;
    model.kernels["flash_attn2"].emplace(
        one, KernelCost{"a test", CostCurve::constant(number), number / 10});
  }
  const Prices prices =
      make_prices(model, problem, {&registry().get("flash_attn2")}, Place::cuda(0));
  return prices.kernel("flash_attn2");
}

double assumed(const ProblemClass& problem) {
  return registry().get("flash_attn2").assumed_rate(problem, Place::cuda(0));
}

ProblemClass half(std::int64_t dim, MaskKind mask, bool soft_cap = false) {
  return {DType::bfloat16, dim, dim, mask, soft_cap};
}

// Threads share the work of kernels; memory and messages stay as they are.
TEST(Prices, KnowTheThreadsOfARank) {
  const AttentionProblem problem = causal_problem(1024);
  const std::vector<const Implementation*> native{&registry().get("native")};
  const auto rate = [&](const CostModel& model) {
    return make_prices(model, problem, native, Place::host()).kernel("native").rate.clamped(1024);
  };
  CostModel model = CostModel::cpu_core();
  const double one = rate(model);
  model.use_threads(4);
  EXPECT_EQ(rate(model), 4 * one);
  EXPECT_EQ(model.source, "assumed: 4 CPU threads per rank, ranks of one node");
  EXPECT_EQ(model.merge_bytes_per_second, CostModel::cpu_core().merge_bytes_per_second);
  // Measured with 4 threads: the same rate for 4, half of it for 2.
  model.source = "measured: here";
  model.kernels["native"].emplace(class_of(problem),
                                  KernelCost{"a test", CostCurve::constant(8e9), 0});
  for (const int threads : {4, 2}) {
    CostModel used = parse_cost_model(to_json(model), "model.json");
    used.use_threads(threads);
    EXPECT_EQ(rate(used), threads * 2e9);
    EXPECT_EQ(used.source, threads == 4 ? "measured: here"
                                        : "measured: here; kernels scaled from 4 to 2 threads");
  }
  // Older files do not have the number of threads.
  model.threads = 0;
  CostModel unknown = parse_cost_model(to_json(model), "model.json");
  unknown.use_threads(2);
  EXPECT_EQ(rate(unknown), 8e9);
  CostModel gpu = CostModel::hopper_nvlink();
  gpu.use_threads(64);
  EXPECT_EQ(gpu.source, CostModel::hopper_nvlink().source);
}

TEST(Prices, AreThoseThatWereMeasuredForTheClass) {
  const KernelCost cost =
      price({half(64, MaskKind::none), half(64, MaskKind::band), half(128, MaskKind::band)});
  EXPECT_EQ(cost.rate, CostCurve::constant(2));
  EXPECT_EQ(cost.call_latency, 0.2);
  EXPECT_EQ(cost.source, "measured for bfloat16 D=64 Dv=64, mask band (a test)");
  EXPECT_EQ(cost.knowledge, Knowledge::measured);
}

// They are one kernel.
TEST(Prices, OfBlocksparseAreThoseOfTheFlashKernel) {
  CostModel model = CostModel::hopper_nvlink();
  model.kernels["flash_attn2"] = {
      {half(64, MaskKind::blocks), {"a test", CostCurve::constant(3), 0.5}}};
  AttentionProblem problem = causal_problem(1024);
  problem.mask.set_block_mask(BlockMask::causal(1024, 1024));
  const Prices prices = make_prices(
      model, problem, {&registry().get("blocksparse"), &registry().get("native")}, Place::cuda(0));
  EXPECT_EQ(prices.kernel("blocksparse").rate, CostCurve::constant(3));
  EXPECT_EQ(prices.kernel("blocksparse").knowledge, Knowledge::measured);
  EXPECT_EQ(prices.knowledge(), "blocksparse measured, native assumed");
}

TEST(Prices, FallBackOnTheNearestClassThatWasMeasured) {
  // Which of the measured ones is the nearest to D = 64 with a band.
  const auto nearest = [](const std::vector<ProblemClass>& measured, std::size_t expected) {
    const KernelCost cost = price(measured);
    const ProblemClass& taken = measured.at(expected);
    EXPECT_THAT(cost.source, AllOf(StartsWith("nearest measured class: " + to_string(taken) +
                                              " (a test), times "),
                                   EndsWith("for bfloat16 D=64 Dv=64, mask band")));
    const double factor = assumed(half(64, MaskKind::band)) / assumed(taken);
    EXPECT_DOUBLE_EQ(cost.rate.clamped(1), static_cast<double>(expected + 1) * factor);
    EXPECT_EQ(cost.call_latency, static_cast<double>(expected + 1) / 10);
    EXPECT_EQ(cost.knowledge, Knowledge::nearest);
  };
  // The dtype before head dimensions, head dimensions before the mask, the mask before the soft
  // cap.
  nearest({half(128, MaskKind::band), half(96, MaskKind::general, true), half(256, MaskKind::band)},
          1);
  nearest({half(64, MaskKind::blocks), half(64, MaskKind::segments, true)}, 1);
  nearest({half(64, MaskKind::none, true), half(64, MaskKind::none)}, 1);
  nearest({{DType::float16, 64, 64, MaskKind::band, false}, half(256, MaskKind::general)}, 1);
  nearest({{DType::float32, 64, 64, MaskKind::band, false},
           {DType::float16, 128, 128, MaskKind::none, false}},
          1);
}

// A measured class of the same pass before one of the same head dimensions; of the other pass, what
// was measured counts by the ratio of the rates that are assumed of the two.
TEST(Prices, OfAPassAreThoseOfItsClasses) {
  ProblemClass band = half(64, MaskKind::band);
  ProblemClass wide = half(128, MaskKind::band);
  wide.pass = Pass::backward;
  CostModel model = CostModel::hopper_nvlink();
  const auto price_of = [&](Pass pass) {
    return make_prices(model, causal_problem(1024), {&registry().get("flash_attn2")},
                       Place::cuda(0), pass)
        .kernel("flash_attn2");
  };
  const double forward = assumed(band);
  band.pass = Pass::backward;
  const double backward = assumed(band);
  EXPECT_NE(backward, forward);
  EXPECT_EQ(price_of(Pass::backward).rate, CostCurve::constant(backward));
  EXPECT_EQ(price_of(Pass::backward).source,
            "assumed for bfloat16 D=64 Dv=64, mask band, backward");
  model.kernels["flash_attn2"] = {
      {half(64, MaskKind::band), {"a test", CostCurve::constant(2 * forward), 0.5}}};
  EXPECT_DOUBLE_EQ(price_of(Pass::backward).rate.clamped(1), 2 * backward);
  EXPECT_EQ(price_of(Pass::backward).knowledge, Knowledge::nearest);
  EXPECT_EQ(price_of(Pass::forward).knowledge, Knowledge::measured);
  model.kernels["flash_attn2"].emplace(
      wide, KernelCost{"a test", CostCurve::constant(assumed(wide) / 2), 0.25});
  EXPECT_DOUBLE_EQ(price_of(Pass::backward).rate.clamped(1), backward / 2);
  EXPECT_EQ(price_of(Pass::backward).call_latency, 0.25);
  EXPECT_EQ(price_of(Pass::forward).rate, CostCurve::constant(2 * forward));
}

TEST(Prices, AreAssumedWhereNothingWasMeasured) {
  const KernelCost cost = price({});
  EXPECT_EQ(cost.knowledge, Knowledge::assumed);
  EXPECT_EQ(cost.source, "assumed for bfloat16 D=64 Dv=64, mask band");
  EXPECT_EQ(cost.rate, CostCurve::constant(assumed(half(64, MaskKind::band))));
  AttentionProblem capped = causal_problem(1024);
  capped.soft_cap = 20;
  EXPECT_EQ(price({}, capped).source, "assumed for bfloat16 D=64 Dv=64, mask band, soft cap");
}

TEST(Prices, AreOfTheCandidatesAlone) {
  const Prices prices = make_prices(CostModel::cpu_core(), causal_problem(64),
                                    {&registry().get("native")}, Place::host());
  EXPECT_GT(prices.kernel("native").seconds(1, 1, 1, 0), 0);
  EXPECT_THROW((void)prices.kernel("sdpa"), InternalError);
}

TEST(Prices, AreOfTheDeviceThatComputes) {
  for (const auto& [model, place, expected] :
       {std::tuple{CostModel::hopper_nvlink(), Place::host(), "expected one of CPU ranks"},
        {CostModel::cpu_core(), Place::cuda(0), "expected one of GPU ranks"}}) {
    try {
      (void)make_prices(model, causal_problem(64), {&registry().get("native")}, place);
      ADD_FAILURE() << "no error; " << expected;
    } catch (const ArgumentError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(model.source), HasSubstr(expected)));
    }
  }
}

// The planner's choice follows what was measured for the problem's own class.
TEST(Prices, DecideWhoComputesABlock) {
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    AttentionProblem problem = causal_problem(8192);
    problem.dtype = dtype;
    const ShardedOperands operands = sequence_operands(problem, 1, LayoutKind::contiguous);
    CostModel model = CostModel::hopper_nvlink();
    // The plain kernel wins in bfloat16.
    ProblemClass other = half(64, MaskKind::band);
    other.dtype = DType::float16;
    model.kernels["native"] = {{half(64, MaskKind::band), {"", CostCurve::constant(1e15), 0}},
                               {other, {"", CostCurve::constant(1e9), 0}}};
    const PlanInput input =
        gpu_input(problem, operands, PlanOptions::for_place(Place::cuda(0)), model);
    const RankPlan plan = make_rank_plan(input, Schedule::local, 0);
    EXPECT_EQ(plan.implementation_of(*plan.all<Block>().at(0)),
              dtype == DType::bfloat16 ? "native" : "sdpa");
  }
}

// Each pass has kernels of its own: the one that is faster forward may be slower backward.
TEST(Prices, DecideWhoComputesGradients) {
  const AttentionProblem problem = causal_problem(8192);
  const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::contiguous);
  const annulus::test::WrappedNative other("other",
                                           [](std::unique_ptr<Kernel> kernel) { return kernel; });
  const std::vector<const Implementation*> candidates{&registry().get("native"), &other};
  for (const bool other_is_faster : {false, true}) {
    PlanInput input = make_plan_input(problem, operands, candidates, Place::host(),
                                      CostModel::cpu_core(), {}, BackwardRequest{});
    set_rate(input.prices, "native", 1e9);
    set_rate(input.prices, "other", other_is_faster ? 2e9 : 0.5e9);
    const double seconds = predicted_seconds(make_plan(input, Schedule::ring), input.prices);
    const RankPlan plan = make_rank_plan(input, Schedule::ring, 1);
    for (const BackwardBlock* block : plan.all<BackwardBlock>()) {
      EXPECT_EQ(plan.implementation_of(*block), other_is_faster ? "other" : "native");
    }
    // 2 (3 D + 2 Dv) operations per pair and head, at the rate of the backward pass, and the
    // gradients' memory.
    const double computing =
        8192.0 * 8192 / 2 * 3 / 4 * 8 * 2 * 5 * 64 / (other_is_faster ? 2e9 : 1e9);
    EXPECT_GT(seconds, computing);
    EXPECT_LT(seconds, 1.05 * computing);
  }
}

}  // namespace
}  // namespace annulus::ring
