// reshard() and shard_map() with arrays on GPUs.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/partition/shard_map_call.hpp>

#include "random_sharding.hpp"
#include "tests/support/rank_device.hpp"
#include "tests/support/test_world.hpp"

namespace annulus {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class DeviceReshard : public test::RankDeviceTest<> {
 protected:
  void SetUp() override {
    RankDeviceTest::SetUp();
    if (IsSkipped()) return;
    stream_ = device().make_stream("test", test::kWatchdog, nullptr);
  }
  [[nodiscard]] static Mesh mesh_of(const MeshShape& shape) {
    return {shape, test::session().world(), test::kWatchdog};
  }

  // A shard on the device whose elements are their numbers in the array.
  [[nodiscard]] Tensor numbers(const NamedSharding& sharding, int rank) {
    const Tensor host(DType::int32, sharding.local_shape(rank), host_.memory());
    test::number_elements(sharding, rank, host.view());
    Tensor shard(DType::int32, host.shape(), device().memory());
    device().copy(host.view(), shard.view(), *stream_);
    return shard;
  }
  void expect_numbers(const NamedSharding& sharding, int rank, const ConstTensorView& shard) {
    const Tensor host(DType::int32, sharding.local_shape(rank), host_.memory());
    device().copy(shard, host.view(), *stream_);
    stream_->synchronize();
    EXPECT_EQ(test::wrong_numbers(sharding, rank, host.view()), 0) << to_string(sharding);
  }

  HostDevice host_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(DeviceReshard, MovesRandomShardings) {
  test::Random random(32);
  for (int trial = 0; trial < 6; ++trial) {
    Mesh mesh = mesh_of(test::random_mesh(random, test::session().size()));
    for (int pair = 0; pair < 4; ++pair) {
      const auto [from, to] = test::random_shardings(random, mesh.shape());
      SCOPED_TRACE(to_string(from) + " → " + to_string(to));
      const Tensor source = numbers(from, mesh.rank());
      const Tensor destination(DType::int32, to.local_shape(mesh.rank()), device().memory());
      reshard(mesh, device(), *stream_, from, source.view(), to, destination.view());
      expect_numbers(to, mesh.rank(), destination.view());
    }
  }
}

// The body returns what it was given; its argument moves and its result is compared.
TEST_F(DeviceReshard, ShardMapMovesArgumentsAndComparesResults) {
  const int ranks = test::session().size();
  Mesh mesh = mesh_of(MeshShape({{"sp", ranks}}));
  const std::vector<Distribution> zigzag{Distribution::sequence(LayoutKind::zigzag)};
  const NamedSharding sharding(mesh.shape(), PartitionSpec::parse("sp,-"), {37, 12}, zigzag);
  const ShardedTensor array(sharding, mesh.rank(), numbers(sharding, mesh.rank()));
  const auto same = [&](std::span<const ConstTensorView> shards) {
    std::vector<Tensor> results;
    results.emplace_back(DType::int32, shards[0].shape(), device().memory());
    device().copy(shards[0], results[0].view(), *stream_);
    return results;
  };
  const ShardMap everywhere{
      .body = same, .in_specs = {PartitionSpec()}, .out_specs = {PartitionSpec()}};
  const auto results = shard_map(mesh, device(), *stream_, everywhere, {array});
  ASSERT_EQ(results.size(), 1U);
  expect_numbers(results[0].sharding(), mesh.rank(), results[0].local());

  if (ranks == 1) return;
  // Shards differ, so that a result without an axis is no array.
  const ShardMap wrong{
      .body = same, .in_specs = {PartitionSpec::parse("-,sp")}, .out_specs = {PartitionSpec()}};
  EXPECT_THAT([&] { (void)shard_map(mesh, device(), *stream_, wrong, {array}); },
              ThrowsMessage<UserError>(HasSubstr("result 0")));
}

TEST_F(DeviceReshard, OneDeviceForAll) {
  const int ranks = test::session().size();
  Mesh mesh = mesh_of(MeshShape({{"sp", ranks}}));
  const NamedSharding sharding(mesh.shape(), PartitionSpec::parse("sp"), {2 * ranks});
  const Tensor there = numbers(sharding, mesh.rank());
  const Tensor here(DType::int32, {2}, host_.memory());
  EXPECT_THAT(
      [&] { reshard(mesh, device(), *stream_, sharding, there.view(), sharding, here.view()); },
      ThrowsMessage<UserError>(
          HasSubstr("destination: got memory of cpu, expected memory of cuda")));
  if (ranks == 1) return;
  // The last rank calls with its CPU.
  const bool odd = mesh.rank() == ranks - 1;
  const auto host_stream = host_.make_stream("test", test::kWatchdog, nullptr);
  std::fill_n(here.view().as<std::int32_t>(), 2, 0);
  const TensorView view = odd ? here.view() : there.view();
  EXPECT_THAT(
      [&] {
        reshard(mesh, odd ? host_ : device(), odd ? *host_stream : *stream_, sharding, view,
                sharding, view);
      },
      ThrowsMessage<UserError>(HasSubstr("device: got a CPU on rank " + std::to_string(ranks - 1) +
                                         ", expected a GPU, as on rank 0")));
}

}  // namespace
}  // namespace annulus
