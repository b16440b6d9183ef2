// Slices of arrays in files against indexing one element at a time.
#include <algorithm>
#include <array>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/position.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/mesh/group.hpp>

#include "tests/launcher/files/files_test_support.hpp"
#include "tests/support/for_each_index.hpp"

namespace annulus::files {
namespace {

PositionRange range(std::int64_t start, std::int64_t length, std::int64_t stride = 1) {
  return {GlobalPosition(start), length, stride};
}

class Slices : public ::testing::Test {
 protected:
  std::int64_t below(std::int64_t bound) {
    return std::uniform_int_distribution<std::int64_t>(0, bound - 1)(random_);
  }

  // Positions of a dimension that a rank may hold under some layout.
  PositionRanges positions(std::int64_t size) {
    if (size == 0) return PositionRanges::all(0);
    switch (below(5)) {
      case 0:
        return PositionRanges::all(size);
      case 1: {
        const std::int64_t start = below(size);
        return PositionRanges({range(start, below(size - start + 1))});
      }
      case 2: {  // zigzag
        const std::int64_t chunk = below(size / 2 + 1);
        return PositionRanges({range(0, chunk), range(size - chunk, chunk)});
      }
      case 3: {  // striped
        const std::int64_t ranks = below(size) + 1;
        const std::int64_t rank = below(ranks);
        return PositionRanges({range(rank, (size - rank + ranks - 1) / ranks, ranks)});
      }
      default: {  // pieces in any order
        std::vector<PositionRange> pieces;
        for (std::int64_t at = 0; at < size;) {
          const std::int64_t length = std::min(size - at, below(3) + 1);
          if (below(3) != 0) pieces.push_back(range(at, length));
          at += length;
        }
        std::shuffle(pieces.begin(), pieces.end(), random_);
        return PositionRanges(pieces);
      }
    }
  }

  // Strides of some order of the dimensions, with gaps.
  std::pair<Extents, std::int64_t> strides(const Extents& shape) {
    std::vector<int> order(static_cast<std::size_t>(shape.rank()));
    std::iota(order.rbegin(), order.rend(), 0);
    if (below(2) == 0) std::shuffle(order.begin(), order.end(), random_);
    Extents result = shape;
    std::int64_t stride = below(4) == 0 ? 2 : 1;
    for (const int dim : order) {
      result[dim] = stride;
      stride *= std::max<std::int64_t>(shape[dim], 1);
      if (below(4) == 0) stride += below(3);
    }
    return {result, stride};
  }

  test::ScratchDirectory scratch_;
  std::shared_ptr<Control> group_ = make_self_group()->shared_control();
  std::mt19937 random_{7};
};

Extents local_shape(const std::vector<PositionRanges>& index) {
  std::vector<std::int64_t> sizes;
  sizes.reserve(index.size());
  for (const PositionRanges& positions : index) sizes.push_back(positions.size());
  return Extents(sizes);
}

std::int64_t dot(const std::vector<std::int64_t>& index, const Extents& strides) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < index.size(); ++i) sum += index[i] * strides[static_cast<int>(i)];
  return sum;
}

// Offset of a local index in the whole array.
std::int64_t global_offset(const std::vector<std::int64_t>& local,
                           const std::vector<PositionRanges>& index, const Extents& shape) {
  std::vector<std::int64_t> global;
  for (std::size_t i = 0; i < local.size(); ++i) {
    global.push_back(index[i].global(LocalPosition(local[i])).value());
  }
  return dot(global, contiguous_strides(shape));
}

constexpr std::int32_t kUntouched = -1;

TEST_F(Slices, ReadWhatIndexingReads) {
  for (int trial = 0; trial < 400; ++trial) {
    std::vector<std::int64_t> sizes;
    for (std::int64_t rank = below(5); rank > 0; --rank) sizes.push_back(below(9));
    const Extents shape{std::span<const std::int64_t>(sizes)};
    std::vector<std::int32_t> values(static_cast<std::size_t>(shape.product()));
    std::iota(values.begin(), values.end(), 0);
    const std::string path = scratch_.file("a.npy");
    test::write_array(path, "", DType::int32, shape, values.data());
    const ArrayFile file(path);
    for (int slice = 0; slice < 5; ++slice) {
      std::vector<PositionRanges> index;
      std::string text;
      for (const std::int64_t size : sizes) {
        index.push_back(positions(size));
        text += to_string(index.back()) + " ";
      }
      const Extents local = local_shape(index);
      const auto [stride, extent] = strides(local);
      SCOPED_TRACE(to_string(shape) + " at " + text + "strides " + to_string(stride));
      std::vector<std::int32_t> memory(static_cast<std::size_t>(extent), kUntouched);
      std::vector<std::int32_t> expected = memory;
      test::for_each_index(local, [&, &stride = stride](const auto& at) {
        expected[static_cast<std::size_t>(dot(at, stride))] =
            static_cast<std::int32_t>(global_offset(at, index, shape));
      });
      file.read_slice(index, {memory.data(), DType::int32, local, stride});
      ASSERT_EQ(memory, expected);
    }
  }
}

// The array is split into a grid of shards; written shard by shard, it must come out whole.
TEST_F(Slices, WrittenShardsMakeTheArray) {
  const Extents shape{2, 24, 6, 5};
  std::vector<std::int32_t> values(static_cast<std::size_t>(shape.product()));
  std::iota(values.begin(), values.end(), 0);
  const std::vector<std::vector<PositionRanges>> layouts{
      {PositionRanges({range(0, 12)}), PositionRanges({range(12, 12)})},
      {PositionRanges({range(0, 6), range(18, 6)}), PositionRanges({range(6, 12)})},
      {PositionRanges({range(0, 8, 3)}), PositionRanges({range(1, 8, 3)}),
       PositionRanges({range(2, 8, 3)})}};
  for (const auto& sequence : layouts) {
    for (const std::int64_t head_shards : {1, 3}) {
      const std::string path = scratch_.file("a.npy");
      ArrayWriter writer(*group_, path, {{"", DType::int32, shape}});
      for (const PositionRanges& positions : sequence) {
        for (std::int64_t shard = 0; shard < head_shards; ++shard) {
          const std::int64_t heads = 6 / head_shards;
          const std::vector<PositionRanges> index{PositionRanges::all(2), positions,
                                                  PositionRanges({range(shard * heads, heads)}),
                                                  PositionRanges::all(5)};
          const Extents local = local_shape(index);
          const auto [stride, extent] = strides(local);
          std::vector<std::int32_t> memory(static_cast<std::size_t>(extent), kUntouched);
          test::for_each_index(local, [&, &stride = stride](const auto& at) {
            memory[static_cast<std::size_t>(dot(at, stride))] =
                static_cast<std::int32_t>(global_offset(at, index, shape));
          });
          writer.write_slice(index, {memory.data(), DType::int32, local, stride});
        }
      }
      writer.commit();
      std::vector<std::int32_t> result(values.size());
      ArrayFile(path).read_slice(whole(shape), {result.data(), DType::int32, shape});
      EXPECT_EQ(result, values);
    }
  }
}

// Slices that go through the staging buffer more than once, and runs longer than it.
TEST_F(Slices, LargerThanTheStagingBuffer) {
  const Extents shape{2, 6000, 8, 64};
  std::vector<std::uint8_t> values(static_cast<std::size_t>(shape.product()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::uint8_t>((i * 2654435761U) >> 13U);
  }
  const std::string path = scratch_.file("a.npy");
  test::write_array(path, "", DType::uint8, shape, values.data());
  const ArrayFile file(path);
  const auto all = whole(shape);
  const std::vector<std::vector<PositionRanges>> cases{
      {all[0], PositionRanges({range(0, 3000)}), all[2], all[3]},
      {all[0], PositionRanges({range(0, 1500), range(4500, 1500)}), all[2], all[3]},
      {all[0], PositionRanges({range(3, 750, 8)}), all[2], all[3]},
      {all[0], all[1], PositionRanges({range(6, 2)}), all[3]},
      {all[0], all[1], all[2], PositionRanges({range(1, 32, 2)})},
      {PositionRanges({range(1, 1)}), all[1], all[2], all[3]},
  };
  for (const auto& index : cases) {
    const Extents local = local_shape(index);
    // Dense, and with a gap behind every row.
    for (const std::int64_t gap : {0, 3}) {
      Extents stride = local;
      stride[3] = 1;
      stride[2] = local[3] + gap;
      stride[1] = stride[2] * local[2];
      stride[0] = stride[1] * local[1];
      std::vector<std::uint8_t> memory(static_cast<std::size_t>(stride[0] * local[0]), 0);
      file.read_slice(index, {memory.data(), DType::uint8, local, stride});
      std::int64_t wrong = 0;
      test::for_each_index(local, [&](const auto& at) {
        const auto offset = static_cast<std::size_t>(global_offset(at, index, shape));
        wrong += memory[static_cast<std::size_t>(dot(at, stride))] != values[offset] ? 1 : 0;
      });
      EXPECT_EQ(wrong, 0) << to_string(index[1]) << " " << to_string(index[2]) << " gap " << gap;
    }
  }
}

TEST_F(Slices, IndexViewAndFileMustFit) {
  const std::string path = scratch_.file("a.npy");
  test::write_bytes(path, test::npy(1, test::npy_dictionary("|u1", "(2, 4)"), "abcdefgh"));
  const ArrayFile file(path);
  std::array<std::uint8_t, 16> memory{};
  const auto read = [&](std::vector<PositionRanges> index, DType dtype, const Extents& shape) {
    file.read_slice(index, {memory.data(), dtype, shape});
  };
  const PositionRanges two = PositionRanges::all(2);
  EXPECT_NO_THROW(read({two, two}, DType::uint8, {2, 2}));
  EXPECT_THROW(read({two, two}, DType::boolean, {2, 2}), InternalError);
  EXPECT_THROW(read({two, two}, DType::uint8, {2, 3}), InternalError);
  EXPECT_THROW(read({two}, DType::uint8, {2}), InternalError);
  EXPECT_THROW(read({two, PositionRanges::all(5)}, DType::uint8, {2, 5}), InternalError);
  EXPECT_THROW(read({two, PositionRanges({range(-1, 2)})}, DType::uint8, {2, 2}), InternalError);
  EXPECT_THROW(read({two, PositionRanges({range(1, 3, 2)})}, DType::uint8, {2, 3}), InternalError);
}

}  // namespace
}  // namespace annulus::files
