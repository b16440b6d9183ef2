// The runner on ranks of the CPU, above all in the backward pass.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/runner.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/ring/gradient_cases.hpp"
#include "tests/ring/verified_on_host.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

class GradientsOverRanks : public VerifiedOnHost {
 protected:
  void expect_verified(GradientCase one, const char* implementation) {
    one.sharded.implementation = implementation;
    const MeshShape shape = MeshShape::parse(one.mesh, ranks());
    ASSERT_EQ(failure(one.sharded, shape), "") << to_string(one);
  }
};

TEST_F(GradientsOverRanks, TakeEveryWay) {
  for (const GradientCase& one : gradient_cases(ranks())) expect_verified(one, "vanilla");
}

TEST_F(GradientsOverRanks, OfABias) {
  for (const GradientCase& one : bias_gradient_cases(ranks())) expect_verified(one, "native");
}

// A native kernel that takes longer on one rank: the others run ahead of it.
class Slow final : public Kernel {
 public:
  explicit Slow(std::unique_ptr<Kernel> native) : native_(std::move(native)) {}
  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    native_->forward(block, result, context);
  }
  void backward(const annulus::BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    native_->backward(block, gradients, context);
  }

 private:
  std::unique_ptr<Kernel> native_;
};

// Rank 2 sends rank 3 gradients of its columns, head by head, and gets nothing from it: it comes to
// the sum over all ranks while they are still under way.
TEST_F(GradientsOverRanks, ExchangesOfAGroupGoOnWhileARankWaitsForAnotherGroup) {
  if (ranks() != 4) GTEST_SKIP() << "for two rows of two ranks";
  GradientCase one = gradient_case("dp=2,sp=2", "dp,sp", "dp,sp", "allgather",
                                   backward_problem(DType::float32, 8, 4), {.grad_bias = true});
  AttentionProblem& problem = one.sharded.problem;
  problem.shape.head_dim = problem.shape.value_dim = 256;  // messages wait for their receiver
  // Chunks 1 and 2 of 4, which are rank 3's (and rank 1's), are all that anybody sees.
  const auto length = static_cast<std::size_t>(problem.shape.kv_length);
  const std::vector<std::int32_t> rows(2 * length, 0);
  std::vector<std::int32_t> columns(2 * length, -1);
  for (std::size_t j = 6; j < 18; ++j) columns[j] = columns[length + j] = 0;
  problem.mask = {};
  problem.mask.set_segments(2, rows, columns);
  problem.bias = Extents{1, 1, 1, problem.shape.kv_length};
  one.sharded.plan->gather_bytes = 1;  // a head at a time
  test::add_native(context(MeshShape::parse(one.mesh, ranks())).registry(), "slow", 1,
                   [](std::unique_ptr<Kernel> native) -> std::unique_ptr<Kernel> {
                     if (test::session().rank() != 3) return native;
                     return std::make_unique<Slow>(std::move(native));
                   });
  expect_verified(one, "slow");
}

Mesh world_mesh() {
  return {"sp=-1", test::session().world(), test::kWatchdog};
}

TEST(Runner, SaysForWhichBuffersThereIsNoMemory) {
  if (test::session().size() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  Mesh mesh = world_mesh();
  AttentionProblem problem = backward_problem(DType::float32, 4, 2);
  problem.mask = {};
  problem.shape.batch = std::int64_t{1} << 50U;
  const ShardedOperands operands = shard_operands(
      problem, mesh.shape(),
      {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"), LayoutKind::contiguous});
  const Registry registry = Registry::standard();
  const PlanInput input = make_plan_input(problem, operands, {&registry.get("native")},
                                          Place::host(), CostModel::cpu_core(), {});
  HostDevice device;
  const AxisNames axes{"sp"};
  EXPECT_THAT(test::message_of<LibraryError>([&] {
                (void)make_runner(problem, make_rank_plan(input, Schedule::ring, mesh.rank()),
                                  input.candidates, {&mesh.group(axes)}, device, mesh.watchdog(),
                                  {});
              }),
              ::testing::ContainsRegex("^buffers of the plan \\([0-9.]+ .iB to exchange, of which "
                                       "the largest holds key \\[.*\\] of float32.*\\): cpu: no "
                                       "memory for "));
}

TEST(Runner, TensorsThatDoNotFitThePlanAreNamed) {
  Mesh mesh = world_mesh();
  const AttentionProblem problem = backward_problem(DType::float32, 4, 2);
  const ShardedOperands operands = shard_operands(
      problem, mesh.shape(),
      {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"), LayoutKind::zigzag});
  const Registry registry = Registry::standard();
  const PlanInput input =
      make_plan_input(problem, operands, {&registry.get("vanilla")}, Place::host(),
                      CostModel::cpu_core(), {}, BackwardRequest{});
  HostDevice device;
  const AxisNames axes{"sp"};
  const auto runner =
      make_runner(problem, make_rank_plan(input, Schedule::ring, mesh.rank()), input.candidates,
                  {&mesh.group(axes)}, device, mesh.watchdog(), {});
  std::vector<CallTensor> tensors = runner->expected();
  EXPECT_THAT(test::message_of<ArgumentError>([&] { runner->check(tensors); }),
              ::testing::HasSubstr("query: got a null pointer"));
  tensors.pop_back();
  EXPECT_THAT(test::message_of<InternalError>([&] { runner->check(tensors); }),
              ::testing::HasSubstr("lacks a tensor for grad value"));
  tensors.push_back({Content::grad_lse, TensorView()});
  tensors.push_back({Content::grad_value, TensorView()});
  EXPECT_THROW(runner->check(tensors), InternalError);
}

}  // namespace
}  // namespace annulus::ring
