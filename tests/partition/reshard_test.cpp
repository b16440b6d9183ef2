#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/device.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/reshard.hpp>

#include "random_sharding.hpp"
#include "tests/support/pretended_device.hpp"
#include "tests/support/test_world.hpp"

namespace annulus {
namespace {

using test::for_each_entry;
using test::linear;
using test::Random;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::array kDTypes{DType::boolean,  DType::uint8,   DType::int32,  DType::float16,
                             DType::bfloat16, DType::float32, DType::float64};

class ReshardTest : public ::testing::Test {
 protected:
  static Mesh mesh_of(const MeshShape& shape) {
    return {shape, test::session().world(), test::kWatchdog};
  }
  [[nodiscard]] NamedSharding along(const char* spec, const Extents& shape,
                                    const std::vector<Distribution>& distributions = {}) const {
    return {mesh_.shape(), PartitionSpec::parse(spec), shape, distributions};
  }
  Tensor zeros(const NamedSharding& sharding, DType dtype = DType::float32) {
    Tensor shard(dtype, sharding.local_shape(mesh_.rank()), device_.memory());
    shard.fill_zero();
    return shard;
  }
  /// The beginning of an error that only the last rank has.
  [[nodiscard]] std::string blame() const {
    return ranks_ == 1 ? "" : "rank " + std::to_string(ranks_ - 1) + ": ";
  }

  const int ranks_ = test::session().size();
  Mesh mesh_ = mesh_of(MeshShape({{"sp", ranks_}}));
  const bool last_ = mesh_.rank() == ranks_ - 1;
  const NamedSharding rows_ = along("sp", {2 * ranks_, 3 * ranks_});
  const NamedSharding columns_ = along("-,sp", {2 * ranks_, 3 * ranks_});
  HostDevice device_;
  std::unique_ptr<Stream> stream_ = device_.make_stream("test", test::kWatchdog, nullptr);
};

// Bytes that tell elements apart as far as their size allows; bools stay 0 or 1.
std::vector<std::byte> value_of(std::int64_t number, DType dtype) {
  std::vector<std::byte> bytes(size_of(dtype));
  std::int64_t value = number * 2654435761 + 1;
  if (dtype == DType::boolean) value = (value >> 7) & 1;
  std::memcpy(bytes.data(), &value, bytes.size());
  return bytes;
}

std::byte* at(const TensorView& view, const std::vector<std::int64_t>& index) {
  return static_cast<std::byte*>(view.data()) +
         test::offset_of(view, index) * static_cast<std::int64_t>(size_of(view.dtype()));
}

// A shard in memory of its own, with gaps and an order of dimensions drawn at random.
class Shard {
 public:
  Shard(Random& random, DType dtype, const Extents& shape, MemoryPool& pool) {
    Extents storage = shape;
    std::vector<int> order;
    for (int dim = 0; dim < shape.rank(); ++dim) {
      order.insert(order.begin() + test::draw(random, 0, dim), dim);
    }
    for (int i = 0; i < shape.rank(); ++i) {
      storage[i] = shape[order[static_cast<std::size_t>(i)]] + test::draw(random, 0, 2);
    }
    memory_ = Tensor(dtype, storage, pool);
    std::memset(memory_.view().data(), kGap, memory_.bytes());
    const Extents storage_strides = contiguous_strides(storage);
    Extents strides = shape;
    for (int i = 0; i < shape.rank(); ++i) {
      strides[order[static_cast<std::size_t>(i)]] = storage_strides[i];
    }
    view_ = TensorView(memory_.view().data(), dtype, shape, strides);
  }

  [[nodiscard]] const TensorView& view() const { return view_; }

  // Bytes that are not 0x5a once the shard's own elements are put back to it.
  [[nodiscard]] std::size_t touched_gaps(const NamedSharding& sharding, int rank) {
    for_each_entry(sharding.index(rank), [&](const auto& local, const auto&) {
      std::memset(at(view_, local), kGap, size_of(view_.dtype()));
    });
    std::size_t touched = 0;
    for (std::size_t i = 0; i < memory_.bytes(); ++i) {
      touched += static_cast<const unsigned char*>(memory_.view().data())[i] != kGap ? 1 : 0;
    }
    return touched;
  }

 private:
  static constexpr unsigned char kGap = 0x5a;
  Tensor memory_;
  TensorView view_;
};

TEST_F(ReshardTest, MovesRandomShardingsOfAllTypes) {
  Random random(31);  // the same numbers on every rank …
  for (int trial = 0; trial < 60; ++trial) {
    Mesh mesh = mesh_of(test::random_mesh(random, test::session().size()));
    for (int pair = 0; pair < 4; ++pair) {
      const auto shardings = test::random_shardings(random, mesh.shape());
      const auto& from = shardings.first;
      const auto& to = shardings.second;
      const DType dtype = kDTypes[static_cast<std::size_t>(test::draw(random, 0, 6))];
      SCOPED_TRACE(to_string(from) + " → " + to_string(to) + " " + std::string(name_of(dtype)));
      Random mine(random() + static_cast<unsigned>(mesh.rank()));  // … but strides of its own
      const Shard source(mine, dtype, from.local_shape(mesh.rank()), device_.memory());
      Shard destination(mine, dtype, to.local_shape(mesh.rank()), device_.memory());
      for_each_entry(from.index(mesh.rank()), [&](const auto& local, const auto& global) {
        const auto value = value_of(linear(from.global_shape(), global), dtype);
        std::memcpy(at(source.view(), local), value.data(), value.size());
      });

      reshard(mesh, device_, *stream_, from, source.view(), to, destination.view());

      int wrong = 0;
      for_each_entry(to.index(mesh.rank()), [&](const auto& local, const auto& global) {
        const auto value = value_of(linear(to.global_shape(), global), dtype);
        wrong += std::memcmp(at(destination.view(), local), value.data(), value.size()) != 0;
      });
      EXPECT_EQ(wrong, 0);
      EXPECT_EQ(destination.touched_gaps(to, mesh.rank()), 0U);
    }
  }
}

TEST_F(ReshardTest, GivesItsMemoryBack) {
  HostDevice device;
  const Extents shape{8 * ranks_, 16};
  const NamedSharding from = along("sp", shape, {Distribution::sequence(LayoutKind::zigzag)});
  const NamedSharding to = along("sp", shape, {Distribution::sequence(LayoutKind::striped)});
  const Tensor source = zeros(from);
  const Tensor destination = zeros(to);
  reshard(mesh_, device, *stream_, from, source.view(), to, destination.view());
  EXPECT_EQ(device.memory().statistics().in_use, 0U);
  // No more than what one shard sends and receives: nothing was gathered.
  EXPECT_LE(device.memory().statistics().peak_in_use,
            2 * source.bytes() + 2 * MemoryPool::kAlignment);
}

TEST_F(ReshardTest, AllRanksThrowForOneRanksBadView) {
  const NamedSharding sharding = along("sp", {2 * ranks_, 3});
  const Tensor good = zeros(sharding);
  const Tensor bad_shape(DType::float32, {2, 4}, device_.memory());
  const Tensor bad_dtype(DType::int32, {2, 3}, device_.memory());
  const auto call = [&](const NamedSharding& both, const Tensor& source,
                        const Tensor& destination) {
    reshard(mesh_, device_, *stream_, both, source.view(), both, destination.view());
  };
  EXPECT_THAT(
      [&] { call(sharding, last_ ? bad_shape : good, good); },
      ThrowsMessage<UserError>(HasSubstr(blame() + "source: got shape [2, 4], expected [2, 3]")));
  EXPECT_THAT(
      [&] { call(sharding, good, last_ ? bad_dtype : good); },
      ThrowsMessage<UserError>(HasSubstr(blame() + "destination: got int32, expected float32")));
  const NamedSharding other(MeshShape({{"elsewhere", ranks_}}), PartitionSpec(), {2, 3});
  EXPECT_THAT([&] { call(other, good, good); }, ThrowsMessage<UserError>(HasSubstr("resharding")));
}

class NoMemory final : public MemoryPool {
 public:
  NoMemory() : MemoryPool(Place::host()) {}

 protected:
  void* system_allocate(std::size_t /*bytes*/) override { return nullptr; }
  void system_free(void* /*data*/, std::size_t /*bytes*/) noexcept override {}
};

/// A host that has no memory left.
class FullDevice final : public test::PretendedDevice {
 public:
  FullDevice() : PretendedDevice(Place::host()) {}
  [[nodiscard]] MemoryPool& memory() noexcept override { return memory_; }
  [[nodiscard]] MemoryPool& staging() override { return memory_; }

 private:
  NoMemory memory_;
};

// The others do not wait for its messages, and can go on afterwards.
TEST_F(ReshardTest, AllRanksThrowWhereOneHasNoMemory) {
  if (ranks_ == 1) GTEST_SKIP() << "needs 2 ranks";
  const Tensor source = zeros(rows_);
  const Tensor destination = zeros(columns_);
  const auto call = [&](Device& device) {
    reshard(mesh_, device, *stream_, rows_, source.view(), columns_, destination.view());
  };
  for (const int full : {0, ranks_ - 1}) {
    FullDevice no_memory;
    EXPECT_THAT([&] { call(mesh_.rank() == full ? static_cast<Device&>(no_memory) : device_); },
                ThrowsMessage<LibraryError>(
                    HasSubstr("rank " + std::to_string(full) + ": cpu: no memory for ")));
    call(device_);
  }
}

TEST_F(ReshardTest, AllRanksThrowWhereTheirArgumentsDiffer) {
  if (ranks_ == 1) GTEST_SKIP() << "needs 2 ranks";
  const std::string on_last = " on rank " + std::to_string(ranks_ - 1) + ", expected ";
  const auto call = [&](DType dtype, const NamedSharding& from, const NamedSharding& to) {
    const Tensor source = zeros(from, dtype);
    const Tensor destination = zeros(to, dtype);
    reshard(mesh_, device_, *stream_, from, source.view(), to, destination.view());
  };
  EXPECT_THAT([&] { call(last_ ? DType::int32 : DType::float32, rows_, columns_); },
              ThrowsMessage<UserError>(HasSubstr("dtype: got int32" + on_last + "float32")));
  EXPECT_THAT([&] { call(DType::float32, last_ ? columns_ : rows_, columns_); },
              ThrowsMessage<UserError>(HasSubstr("sharding of the source: got ")));
  EXPECT_THAT([&] { call(DType::float32, rows_, last_ ? rows_ : columns_); },
              ThrowsMessage<UserError>(HasSubstr("sharding of the destination: got ")));
}

}  // namespace
}  // namespace annulus
