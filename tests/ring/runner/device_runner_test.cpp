// The plans of runner_test.cpp on GPU ranks, over every transport that they have.
#include <string>

#include <gtest/gtest.h>

#include <annulus/attention/registry.hpp>
#include <annulus/mesh/mesh.hpp>

#include "tests/ring/backward_programs.hpp"
#include "tests/support/rank_device.hpp"

namespace annulus::ring {
namespace {

class DeviceRunner : public annulus::test::RankDeviceTest<> {};

TEST_F(DeviceRunner, GradientsOfEveryProgramAgreeWithTheOracle) {
  const Registry registry = Registry::standard();
  for (const Transport transport : {Transport::peer, Transport::nccl, Transport::composite}) {
    // NCCL wants a GPU for every rank.
    if (shared_gpus() && transport != Transport::peer) continue;
    for (const test::Program& program : test::backward_programs(annulus::test::session().size())) {
      SCOPED_TRACE(to_string(program) + ", " + std::string(name_of(transport)));
      Mesh mesh(program.mesh, annulus::test::session().world(), annulus::test::kWatchdog);
      test::expect_gradients(program, mesh, device(), registry.get("native"), transport);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace annulus::ring
