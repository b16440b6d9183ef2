// Sharded attention on GPU ranks against the results of JAX and ejkernel for the same inputs.
#include <string>
#include <vector>

#include <annulus/core/device.hpp>

#include "tests/ring/sharded_reference.hpp"
#include "tests/support/rank_device.hpp"

namespace annulus::ring {
namespace {

using DeviceReferences = test::RankDeviceTest<ShardedReference>;

// With the implementation that is chosen, and with each that supports any block and this problem.
TEST_P(DeviceReferences, AgreeAlongTheSequence) {
  Mesh mesh = make_mesh(MeshShape({{"sp", test::session().size()}}));
  OperandLayout layout;
  layout.query = layout.kv = PartitionSpec::parse("-,sp");
  ShardedAttentionOptions options;
  options.transport = shared_gpus() ? Transport::peer : Transport::automatic;
  for (const char* implementation : {"auto", "native", "flash_attn2"}) {
    options.implementation = implementation;
    if (options.implementation != "auto" &&
        !registry_.get(implementation).capability(problem_, device().place())) {
      continue;
    }
    options.schedule = "ring";
    layout.sequence = LayoutKind::zigzag;
    expect_agrees(mesh, device(), layout, options);
    options.schedule = "allgather";
    layout.sequence = LayoutKind::contiguous;
    expect_agrees(mesh, device(), layout, options);
  }
}

INSTANTIATE_TEST_SUITE_P(Of, DeviceReferences, ::testing::ValuesIn(test::reference_names()),
                         reference_name);

}  // namespace
}  // namespace annulus::ring
