// Plans that no schedule makes yet, on ranks of the CPU: what the backward pass and ulysses need of
// the runner.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/mesh.hpp>

#include "tests/ring/hand_made_runs.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

class RunnerTest : public ::testing::Test {
 protected:
  RunnerTest()
      : mesh_(MeshShape({{"sp", annulus::test::session().size()}}),
              annulus::test::session().world(), annulus::test::kWatchdog) {}
  [[nodiscard]] Group& group() {
    const AxisNames axes{"sp"};
    return mesh_.group(axes);
  }

  Mesh mesh_;
  HostDevice device_;
};

TEST_F(RunnerTest, SumsTravelBehindWhatTheyAdd) {
  test::expect_sums(test::travelling_sums, group(), device_);
}

TEST_F(RunnerTest, SumsAreScatteredAtTheEnd) {
  test::expect_sums(test::scattered_sums, group(), device_);
}

TEST_F(RunnerTest, HeadsAreExchangedForSequenceAndBack) {
  if (8 % mesh_.size() != 0 || 4 % mesh_.size() != 0) GTEST_SKIP() << "heads do not divide";
  test::expect_heads_for_sequence(group(), device_);
}

TEST_F(RunnerTest, TensorsThatDoNotFitThePlanAreNamed) {
  const AttentionShape local{1, 0, 5, 4, 2, 3, 3};
  AttentionProblem problem;
  problem.shape = local;
  const Runner runner(problem, test::scattered_sums(local, mesh_.rank(), mesh_.size()), {},
                      {&group()}, device_, annulus::test::kWatchdog, {});
  std::vector<TensorView> tensors = runner.expected();
  EXPECT_THAT(annulus::test::message_of<ArgumentError>([&] { runner.check(tensors); }),
              ::testing::HasSubstr("grad key: got a null pointer"));
  tensors.pop_back();
  EXPECT_THROW(runner.check(tensors), InternalError);
}

}  // namespace
}  // namespace annulus::ring
