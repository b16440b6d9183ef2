#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/device.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/shard_map_call.hpp>

#include "tests/support/test_world.hpp"

namespace annulus {

using Shards = std::span<const ConstTensorView>;

class ShardMapFixture : public ::testing::Test {
 protected:
  // dp=2 when the ranks allow it, and the rest on sp.
  static MeshShape shape() {
    const int ranks = test::session().size();
    const int dp = ranks % 2 == 0 ? 2 : 1;
    return MeshShape({{"dp", dp}, {"sp", ranks / dp}});
  }

  static std::vector<Tensor> one(Tensor tensor) {
    std::vector<Tensor> results;
    results.push_back(std::move(tensor));
    return results;
  }

  Tensor zeros(DType dtype, const Extents& shape) {
    Tensor tensor(dtype, shape, device_.memory());
    tensor.fill_zero();
    return tensor;
  }

  std::vector<ShardedTensor> run(const ShardMap& map, const ShardedArguments& arguments = {}) {
    return shard_map(mesh_, device_, *stream_, map, arguments);
  }

  HostDevice device_;
  std::unique_ptr<Stream> stream_ = device_.make_stream("test", test::kWatchdog, nullptr);
  Mesh mesh_{shape(), test::session().world(), test::kWatchdog};
};

}  // namespace annulus
