// The gradients of runner_test.cpp on GPU ranks, over every transport that they have.
#include <gtest/gtest.h>

#include "tests/ring/device_attention_fixture.hpp"
#include "tests/ring/gradient_cases.hpp"

namespace annulus::ring {
namespace {

using DeviceGradients = DeviceAttention;

TEST_F(DeviceGradients, TakeEveryWay) {
  const int ranks = test::session().size();
  for (const Transport transport : transports()) {
    for (GradientCase one : gradient_cases(ranks)) {
      SCOPED_TRACE(to_string(one));
      one.sharded.implementation = "native";
      one.sharded.transport = transport;
      expect_verified(one.sharded, MeshShape::parse(one.mesh, ranks));
    }
  }
}

}  // namespace
}  // namespace annulus::ring
