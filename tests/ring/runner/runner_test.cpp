// Plans of the backward pass, which no face offers yet, on ranks of the CPU.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/mesh.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/ring/backward_programs.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

Mesh mesh_of(const std::string& shape) {
  return {shape, annulus::test::session().world(), annulus::test::kWatchdog};
}

TEST(Runner, GradientsOfEveryProgramAgreeWithTheOracle) {
  const Registry registry = Registry::standard();
  HostDevice device;
  for (const test::Program& program : test::backward_programs(annulus::test::session().size())) {
    SCOPED_TRACE(to_string(program));
    Mesh mesh = mesh_of(program.mesh);
    test::expect_gradients(program, mesh, device, registry.get("vanilla"));
    if (HasFatalFailure()) return;
  }
}

TEST(Runner, GradientsOfABiasAgreeWithTheOracle) {
  const Registry registry = Registry::standard();
  HostDevice device;
  for (const test::Program& program : test::bias_programs(annulus::test::session().size())) {
    SCOPED_TRACE(to_string(program));
    Mesh mesh = mesh_of(program.mesh);
    test::expect_gradients(program, mesh, device, registry.get("native"));
    if (HasFatalFailure()) return;
  }
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
TEST(Runner, ExchangesOfAGroupGoOnWhileARankWaitsForAnotherGroup) {
  if (annulus::test::session().size() != 4) GTEST_SKIP() << "for two rows of two ranks";
  const annulus::test::WrappedNative slow(
      "slow", [](std::unique_ptr<Kernel> native) -> std::unique_ptr<Kernel> {
        if (annulus::test::session().rank() != 3) return native;
        return std::make_unique<Slow>(std::move(native));
      });
  test::Program program{"dp=2,sp=2", "dp,sp", "dp,sp", Schedule::allgather,
                        test::backward_problem(DType::float32, 8, 4)};
  AttentionShape& shape = program.problem.shape;
  shape.head_dim = shape.value_dim = 256;  // messages wait for their receiver
  // Chunks 1 and 2 of 4, which are rank 3's (and rank 1's), are all that anybody sees.
  const auto length = static_cast<std::size_t>(shape.kv_length);
  const std::vector<std::int32_t> rows(2 * length, 0);
  std::vector<std::int32_t> columns(2 * length, -1);
  for (std::size_t j = 6; j < 18; ++j) columns[j] = columns[length + j] = 0;
  program.problem.mask = {};
  program.problem.mask.set_segments(2, rows, columns);
  program.problem.bias = Extents{1, 1, 1, shape.kv_length};
  program.options.gather_bytes = 1;  // a head at a time
  program.request.grad_bias = true;
  Mesh mesh = mesh_of(program.mesh);
  HostDevice device;
  test::expect_gradients(program, mesh, device, slow);
}

TEST(Runner, SaysForWhichBuffersThereIsNoMemory) {
  if (annulus::test::session().size() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  Mesh mesh = mesh_of("sp=-1");
  AttentionProblem problem = test::backward_problem(DType::float32, 4, 2);
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
  EXPECT_THAT(annulus::test::message_of<LibraryError>([&] {
                const Runner runner(problem, make_rank_plan(input, Schedule::ring, mesh.rank()),
                                    input.candidates, {&mesh.group(axes)}, device, mesh.watchdog(),
                                    {});
              }),
              ::testing::ContainsRegex("^buffers of the plan \\([0-9.]+ .iB to exchange, of which "
                                       "the largest holds key \\[.*\\] of float32.*\\): cpu: no "
                                       "memory for "));
}

TEST(Runner, TensorsThatDoNotFitThePlanAreNamed) {
  Mesh mesh = mesh_of("sp=-1");
  const AttentionProblem problem = test::backward_problem(DType::float32, 4, 2);
  const ShardedOperands operands = shard_operands(
      problem, mesh.shape(),
      {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"), LayoutKind::zigzag});
  const Registry registry = Registry::standard();
  const PlanInput input =
      make_plan_input(problem, operands, {&registry.get("vanilla")}, Place::host(),
                      CostModel::cpu_core(), {}, BackwardRequest{});
  HostDevice device;
  const AxisNames axes{"sp"};
  const Runner runner(problem, make_rank_plan(input, Schedule::ring, mesh.rank()), input.candidates,
                      {&mesh.group(axes)}, device, mesh.watchdog(), {});
  std::vector<CallTensor> tensors = runner.expected();
  EXPECT_THAT(annulus::test::message_of<ArgumentError>([&] { runner.check(tensors); }),
              ::testing::HasSubstr("query: got a null pointer"));
  tensors.pop_back();
  EXPECT_THAT(annulus::test::message_of<InternalError>([&] { runner.check(tensors); }),
              ::testing::HasSubstr("lacks a tensor for grad value"));
  tensors.push_back({Content::grad_lse, TensorView()});
  tensors.push_back({Content::grad_value, TensorView()});
  EXPECT_THROW(runner.check(tensors), InternalError);
}

}  // namespace
}  // namespace annulus::ring
