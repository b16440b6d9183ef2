#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/device_tensors.hpp>

#include "tests/attention/random_tensor.hpp"
#include "tests/attention/references/comparison.hpp"
#include "tests/attention/references/reference_case.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::ring {

/// The part of a tensor that a rank holds, which has the positions of `sharding` along the first
/// three dimensions, and all of the last.
inline Tensor shard_of(const Tensor& whole, const NamedSharding& sharding, int rank) {
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

/// A case of tests/attention/references, computed by the ranks of the program.
class ShardedReference : public ::testing::TestWithParam<std::string> {
 protected:
  const test::ReferenceCase reference_ = test::read_reference(GetParam());
  const AttentionProblem problem_ = reference_.computed();
  const OracleOutput expected_ = test::expected_of(reference_);
  const Registry registry_ = Registry::standard();

  [[nodiscard]] static Mesh make_mesh(const MeshShape& shape) {
    return {shape, test::session().world(), test::kWatchdog};
  }

  /// Each rank compares its own part of the results. Collective over the mesh.
  void expect_agrees(Mesh& mesh, Device& device, const OperandLayout& layout,
                     const ShardedAttentionOptions& options) {
    SCOPED_TRACE(options.schedule + ", " + std::string(name_of(layout.sequence)) + ", " +
                 options.implementation + ", " + std::string(name_of(options.transport)));
    const ShardedOperands operands = shard_operands(problem_, mesh.shape(), layout);
    ShardedAttention attention(problem_, operands, mesh, registry_, device, options);

    const int rank = mesh.rank();
    const Tensor query = shard_of(reference_.query, operands.query, rank);
    const Tensor key = shard_of(reference_.key, operands.key, rank);
    const Tensor value = shard_of(reference_.value, operands.value, rank);
    const Tensor output = nans(problem_.dtype, operands.output.local_shape(rank));
    const Tensor lse = nans(DType::float32, operands.lse.local_shape(rank));
    LocalTensors tensors{query.view(), key.view(), value.view(), output.view(), lse.view()};
    Tensor bias;
    Tensor mask;
    if (operands.bias) {
      bias = shard_of(reference_.computed_bias(), *operands.bias, rank);
      tensors.bias = bias.view();
    }
    if (operands.dense_mask) {
      mask = shard_of(reference_.computed_mask(), *operands.dense_mask, rank);
      tensors.mask = mask.view();
    }
    verification::DeviceTensors moved(tensors, device, mesh.watchdog());
    moved.upload();
    attention.run(moved.tensors());
    moved.download();

    const std::vector<PositionRanges> index = operands.output.index(rank);
    test::expect_agrees(test::numbers_of(output.view(), lse.view(), problem_.dtype),
                        test::part_of(expected_, problem_.shape, index), reference_);
  }

 private:
  // So that elements that are not written are noticed.
  [[nodiscard]] static Tensor nans(DType dtype, const Extents& shape) {
    Tensor tensor(dtype, shape, test::test_memory());
    std::memset(tensor.view().data(), 0xff, tensor.bytes());
    return tensor;
  }
};

[[nodiscard]] inline std::string reference_name(
    const ::testing::TestParamInfo<std::string>& instance) {
  return instance.param;
}

}  // namespace annulus::ring
