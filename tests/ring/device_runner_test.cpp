// The plans of runner_test.cpp on GPU ranks, over every transport that they have.
#include <vector>

#include <gtest/gtest.h>

#include <annulus/mesh/mesh.hpp>

#include "tests/ring/hand_made_runs.hpp"
#include "tests/support/rank_device.hpp"

namespace annulus::ring {
namespace {

class DeviceRunner : public ::testing::Test {
 public:
  static void SetUpTestSuite() { rank_ = annulus::test::open_rank_device(); }
  static void TearDownTestSuite() { rank_ = {}; }

 protected:
  void SetUp() override {
    if (!rank_.device) GTEST_SKIP() << rank_.missing;
    mesh_ = std::make_unique<Mesh>(MeshShape({{"sp", annulus::test::session().size()}}),
                                   annulus::test::session().world(), annulus::test::kWatchdog);
  }
  template <class Body>
  void for_each_group(const Body& body) {
    const AxisNames axes{"sp"};
    for (const Transport transport : {Transport::peer, Transport::nccl}) {
      // NCCL wants a GPU for every rank.
      if (rank_.shared && transport == Transport::nccl) continue;
      SCOPED_TRACE(name_of(transport));
      body(mesh_->group(axes, rank_.device->place(), transport));
    }
  }

  static annulus::test::RankDevice rank_;  // NOLINT(readability-identifier-naming): as a member
  std::unique_ptr<Mesh> mesh_;
};

annulus::test::RankDevice DeviceRunner::rank_ = {};

TEST_F(DeviceRunner, SumsTravelBehindWhatTheyAdd) {
  for_each_group(
      [&](Group& group) { test::expect_sums(test::travelling_sums, group, *rank_.device); });
}

TEST_F(DeviceRunner, SumsAreScatteredAtTheEnd) {
  for_each_group(
      [&](Group& group) { test::expect_sums(test::scattered_sums, group, *rank_.device); });
}

TEST_F(DeviceRunner, HeadsAreExchangedForSequenceAndBack) {
  for_each_group([&](Group& group) { test::expect_heads_for_sequence(group, *rank_.device); });
}

}  // namespace
}  // namespace annulus::ring
