// Sharded attention against what JAX and ejkernel made of the whole problem, and of theirs sharded.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/ring/sharded_attention.hpp>

#include "tests/attention/random_tensor.hpp"
#include "tests/attention/references/comparison.hpp"
#include "tests/attention/references/reference_case.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::ring {
namespace {

using test::ReferenceCase;
using test::ReferenceSharding;

/// The part of a tensor [b,t,n,d] at the positions of `sharding` that a rank holds.
Tensor shard_of(const Tensor& whole, const NamedSharding& sharding, int rank) {
  Tensor local(whole.dtype(), sharding.local_shape(rank), test::test_memory());
  const std::vector<PositionRanges> index = sharding.index(rank);
  const TensorView view = local.view();
  for (std::int64_t b = 0; b < view.size(0); ++b) {
    for (std::int64_t t = 0; t < view.size(1); ++t) {
      for (std::int64_t n = 0; n < view.size(2); ++n) {
        ConstTensorView from = whole.view();
        const std::array local_position{b, t, n};
        for (int dim = 0; dim < 3; ++dim) {
          const auto at = static_cast<std::size_t>(dim);
          from = from.slice(dim, index[at].global(LocalPosition(local_position[at])).value(), 1);
        }
        copy(from, view.slice(0, b, 1).slice(1, t, 1).slice(2, n, 1));
      }
    }
  }
  return local;
}

class ShardedReferences : public ::testing::TestWithParam<const char*> {
 protected:
  const ReferenceCase reference_ = test::read_reference(GetParam());
  const AttentionProblem problem_ =
      reference_.taken_for ? *reference_.taken_for : reference_.problem;
  const OracleOutput expected_ = test::expected_of(reference_);
  const Registry registry_ = Registry::standard();

  [[nodiscard]] static Mesh make_mesh(const MeshShape& shape) {
    return {shape, test::session().world(), test::kWatchdog};
  }

  void expect_sharded_agrees(Mesh& mesh, const OperandLayout& layout, const std::string& schedule) {
    SCOPED_TRACE(schedule + ", " + std::string(name_of(layout.sequence)));
    HostDevice device;
    const ShardedOperands operands = shard_operands(problem_, mesh.shape(), layout);
    ShardedAttentionOptions options;
    options.schedule = schedule;
    ShardedAttention attention(problem_, operands, mesh, registry_, device, options);

    const int rank = mesh.rank();
    const Tensor query = shard_of(reference_.query, operands.query, rank);
    const Tensor key = shard_of(reference_.key, operands.key, rank);
    const Tensor value = shard_of(reference_.value, operands.value, rank);
    const Tensor output(problem_.dtype, operands.output.local_shape(rank), test::test_memory());
    const Tensor lse(DType::float32, operands.lse.local_shape(rank), test::test_memory());
    attention.run({query.view(), key.view(), value.view(), output.view(), lse.view()});

    const std::vector<PositionRanges> index = operands.output.index(rank);
    test::expect_agrees(test::numbers_of(output.view(), lse.view(), problem_.dtype),
                        test::part_of(expected_, problem_.shape, index), reference_);
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
      expect_sharded_agrees(mesh, layout, schedule);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, ShardedReferences, ::testing::ValuesIn(test::kReferences),
                         [](const auto& instance) { return std::string(instance.param); });

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
  for (const char* schedule : {"auto", "ring", "allgather"}) {
    expect_sharded_agrees(mesh, layout(), schedule);
  }
}

INSTANTIATE_TEST_SUITE_P(Of, JaxSharding,
                         ::testing::Values("jax_shard_map_heads", "jax_shard_map_gathered",
                                           "jax_shard_map_merged", "ejkernel_ring",
                                           "ejkernel_ring_segments",
                                           "ejkernel_ring_window_bfloat16"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace annulus::ring
