// Plans of the backward pass, which no face offers yet, on ranks of the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/mesh.hpp>

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

TEST(Runner, TensorsThatDoNotFitThePlanAreNamed) {
  Mesh mesh = mesh_of("sp=-1");
  const AttentionProblem problem = test::backward_problem(DType::float32, 4, 2);
  const ShardedOperands operands = shard_operands(
      problem, mesh.shape(),
      {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"), LayoutKind::zigzag});
  const Registry registry = Registry::standard();
  PlanInput input = make_plan_input(problem, operands, {&registry.get("vanilla")}, Place::host(),
                                    CostModel::cpu_core(), {});
  input.backward = BackwardRequest{};
  HostDevice device;
  const AxisNames axes{"sp"};
  const Runner runner(problem, make_rank_plan(input, Schedule::ring, mesh.rank()), input.candidates,
                      {&mesh.group(axes)}, device, mesh.watchdog(), {});
  std::vector<CallTensor> tensors = runner.expected();
  EXPECT_THAT(annulus::test::message_of<ArgumentError>([&] { runner.check(tensors); }),
              ::testing::HasSubstr("query: got a null pointer"));
  tensors.pop_back();
  EXPECT_THAT(annulus::test::message_of<InternalError>([&] { runner.check(tensors); }),
              ::testing::HasSubstr("without a tensor for grad value"));
  tensors.push_back({Content::grad_lse, TensorView()});
  tensors.push_back({Content::grad_value, TensorView()});
  EXPECT_THROW(runner.check(tensors), InternalError);
}

}  // namespace
}  // namespace annulus::ring
