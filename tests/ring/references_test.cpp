// Sharded attention against the results of JAX and ejkernel, for whole problems and for problems
// that they sharded.
#include <string>
#include <vector>

#include "tests/ring/sharded_reference.hpp"

namespace annulus::ring {
namespace {

using test::ReferenceSharding;

class ShardedReferences : public ShardedReference {
 protected:
  void expect_agrees_on_host(Mesh& mesh, const OperandLayout& layout, const std::string& schedule) {
    HostDevice device;
    ShardedAttentionOptions options;
    options.schedule = schedule;
    expect_agrees(mesh, device, layout, options);
  }
};

TEST_P(ShardedReferences, AgreeAlongTheSequence) {
  Mesh mesh = make_mesh(MeshShape({{"sp", test::session().size()}}));
  OperandLayout layout;
  layout.query = layout.kv = PartitionSpec::parse("-,sp");
  for (const char* schedule : {"ring", "allgather"}) {
    for (const LayoutKind kind :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
      layout.sequence = kind;
      expect_agrees_on_host(mesh, layout, schedule);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, ShardedReferences, ::testing::ValuesIn(test::reference_names()),
                         reference_name);

// The cases that JAX sharded over 8 devices.
class JaxSharding : public ShardedReferences {
 protected:
  [[nodiscard]] const ReferenceSharding& sharding() const { return *reference_.sharding; }
  [[nodiscard]] MeshShape mesh_shape() const { return MeshShape::parse(sharding().mesh, 8); }
  [[nodiscard]] OperandLayout layout() const {
    return {PartitionSpec::parse(sharding().query_spec), PartitionSpec::parse(sharding().kv_spec),
            LayoutKind::contiguous};
  }
};

TEST_P(JaxSharding, RanksHoldWhatDevicesHold) {
  const ShardedOperands operands = shard_operands(problem_, mesh_shape(), layout());
  const auto expect_same = [&](const char* name, const NamedSharding& ours) {
    const auto found = sharding().devices.find(name);
    if (found == sharding().devices.end()) return;
    ASSERT_EQ(found->second.size(), 8U);
    for (int rank = 0; rank < 8; ++rank) {
      ReferenceSharding::Part part;
      for (const PositionRanges& positions : ours.index(rank)) {
        ASSERT_EQ(positions.ranges().size(), 1U);
        const PositionRange& range = positions.ranges().front();
        EXPECT_EQ(range.stride, 1);
        part.emplace_back(range.start.value(), range.start.value() + range.length);
      }
      EXPECT_EQ(part, found->second[static_cast<std::size_t>(rank)]) << name << ", rank " << rank;
    }
  };
  ASSERT_TRUE(sharding().devices.contains("query") && sharding().devices.contains("key"));
  expect_same("query", operands.query);
  expect_same("query", operands.output);
  expect_same("key", operands.key);
  expect_same("key", operands.value);
  expect_same("lse", operands.lse);
}

TEST_P(JaxSharding, RanksGetWhatDevicesGet) {
  if (test::session().size() != 8) GTEST_SKIP() << "needs 8 ranks";
  Mesh mesh = make_mesh(mesh_shape());
  std::vector<std::string> schedules{"auto"};
  if (shard_operands(problem_, mesh_shape(), layout()).key.shards(1) > 1) {
    schedules.insert(schedules.end(), {"ring", "allgather"});
  } else {
    schedules.emplace_back("local");
  }
  for (const std::string& schedule : schedules) expect_agrees_on_host(mesh, layout(), schedule);
}

INSTANTIATE_TEST_SUITE_P(Of, JaxSharding,
                         ::testing::Values("jax_shard_map_heads", "jax_shard_map_gathered",
                                           "jax_shard_map_merged", "ejkernel_ring",
                                           "ejkernel_ring_sinks", "ejkernel_ring_segments",
                                           "ejkernel_ring_window_bfloat16"),
                         reference_name);

}  // namespace
}  // namespace annulus::ring
