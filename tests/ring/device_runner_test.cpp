// The plans of runner_test.cpp on GPU ranks, over every transport that they have.
#include <vector>

#include <gtest/gtest.h>

#include <annulus/mesh/mesh.hpp>

#include "tests/ring/hand_made_runs.hpp"
#include "tests/support/rank_device.hpp"

namespace annulus::ring {
namespace {

class DeviceRunner : public annulus::test::RankDeviceTest<> {
 protected:
  void SetUp() override {
    RankDeviceTest::SetUp();
    if (IsSkipped()) return;
    mesh_ = std::make_unique<Mesh>(MeshShape({{"sp", annulus::test::session().size()}}),
                                   annulus::test::session().world(), annulus::test::kWatchdog);
  }
  template <class Body>
  void for_each_group(const Body& body) {
    const AxisNames axes{"sp"};
    for (const Transport transport : {Transport::peer, Transport::nccl, Transport::composite}) {
      // NCCL wants a GPU for every rank.
      if (shared_gpus() && transport != Transport::peer) continue;
      SCOPED_TRACE(name_of(transport));
      body(mesh_->group(axes, device().place(), transport));
    }
  }

  std::unique_ptr<Mesh> mesh_;
};

TEST_F(DeviceRunner, SumsTravelBehindWhatTheyAdd) {
  for_each_group([&](Group& group) { test::expect_sums(test::travelling_sums, group, device()); });
}

TEST_F(DeviceRunner, SumsAreScatteredAtTheEnd) {
  for_each_group([&](Group& group) { test::expect_sums(test::scattered_sums, group, device()); });
}

TEST_F(DeviceRunner, HeadsAreExchangedForSequenceAndBack) {
  for_each_group([&](Group& group) { test::expect_heads_for_sequence(group, device()); });
}

}  // namespace
}  // namespace annulus::ring
