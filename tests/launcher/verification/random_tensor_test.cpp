#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <annulus/attention/philox.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/files/array_info.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/verification/random_tensor.hpp>

#include "launcher/verification/entries.hpp"

namespace annulus::verification {
namespace {

using files::whole;
using Index = std::vector<PositionRanges>;

HostMemoryPool memory;

Extents shape_of(const Index& index) {
  std::vector<std::int64_t> sizes;
  for (const PositionRanges& positions : index) sizes.push_back(positions.size());
  return Extents(sizes);
}

Tensor part(const Index& index, const Extents& global_shape, DType dtype, std::uint64_t seed,
            Operand operand) {
  Tensor tensor(dtype, shape_of(index), memory);
  fill_random(tensor.view(), index, global_shape, seed, operand);
  return tensor;
}

Tensor all_of(const Extents& shape, DType dtype, std::uint64_t seed, Operand operand) {
  return part(whole(shape), shape, dtype, seed, operand);
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.view().data(), b.view().data(), a.bytes()) == 0;
}

TEST(RandomTensor, EveryShardingSeesTheSameTensor) {
  const Extents shape{4, 37, 6, 13};
  const MeshShape mesh({{"dp", 2}, {"tp", 3}, {"sp", 4}});
  for (const DType dtype : {DType::float64, DType::float32, DType::float16, DType::bfloat16}) {
    const Tensor all = all_of(shape, dtype, 7, Operand::key);
    for (const LayoutKind layout :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
      const NamedSharding sharding(mesh, PartitionSpec::parse("dp,sp,tp"), shape,
                                   {Distribution::block(), Distribution::sequence(layout)});
      for (int rank = 0; rank < mesh.ranks(); ++rank) {
        const Tensor shard = part(sharding.index(rank), shape, dtype, 7, Operand::key);
        ASSERT_TRUE(is_part_of(shard, sharding, rank, all)) << name_of(layout) << ", rank " << rank;
      }
    }
  }
}

TEST(RandomTensor, StridesDoNotMatter) {
  const Extents shape{2, 5, 3, 4};
  const Tensor straight = all_of(shape, DType::float32, 1, Operand::query);
  const Tensor bhtd(DType::float32, {2, 3, 5, 4}, memory);
  fill_random(bhtd.view().permute({0, 2, 1, 3}), whole(shape), shape, 1, Operand::query);
  const Tensor back(DType::float32, shape, memory);
  copy(bhtd.view().permute({0, 2, 1, 3}), back.view());
  EXPECT_TRUE(same_bits(straight, back));
}

TEST(RandomTensor, HalfTypesAreTheRoundedFloats) {
  const Extents shape{1, 50, 2, 8};
  const Tensor exact = all_of(shape, DType::float32, 3, Operand::value);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const Tensor rounded(dtype, shape, memory);
    from_float32(exact.view().as<float>(), dtype, rounded.view().data(), shape.product());
    EXPECT_TRUE(same_bits(rounded, all_of(shape, dtype, 3, Operand::value)));
  }
}

TEST(RandomTensor, Float64HasDigitsThatFloat32LacksAndIsNearlyTheSame) {
  const Extents shape{1, 50, 2, 8};
  const Tensor narrow = all_of(shape, DType::float32, 3, Operand::value);
  const Tensor wide = all_of(shape, DType::float64, 3, Operand::value);
  for (std::int64_t i = 0; i < shape.product(); ++i) {
    const double number = wide.view().as<double>()[i];
    EXPECT_NEAR(number, narrow.view().as<float>()[i], 1e-6);
    EXPECT_NE(number, static_cast<float>(number));
  }
}

TEST(RandomTensor, SeedsAndOperandsDiffer) {
  const Extents shape{1, 8, 1, 8};
  const auto make = [&](std::uint64_t seed, Operand operand) {
    return all_of(shape, DType::float32, seed, operand);
  };
  const Tensor first = make(1, Operand::query);
  EXPECT_TRUE(same_bits(first, make(1, Operand::query)));
  EXPECT_FALSE(same_bits(first, make(2, Operand::query)));
  EXPECT_FALSE(same_bits(first, make(std::uint64_t{1} << 32U, Operand::query)));
  EXPECT_FALSE(same_bits(first, make(1, Operand::key)));
  EXPECT_FALSE(same_bits(make(1, Operand::key), make(1, Operand::value)));
}

TEST(RandomTensor, IsStandardNormal) {
  const Extents shape{1, 1000, 1, 100};
  const Tensor tensor = all_of(shape, DType::float32, 11, Operand::query);
  const float* numbers = tensor.view().as<float>();
  const auto count = static_cast<std::size_t>(shape.product());
  double sum = 0;
  double squares = 0;
  double fourths = 0;
  double neighbours = 0;
  std::size_t within_one = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double x = numbers[i];
    sum += x;
    squares += x * x;
    fourths += x * x * x * x;
    neighbours += x * numbers[(i + 1) % count];
    within_one += std::abs(x) < 1 ? 1 : 0;
  }
  const auto n = static_cast<double>(count);
  // Four standard deviations of each estimate.
  EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 4 * std::sqrt(2 / n));
  EXPECT_NEAR(fourths / n, 3, 4 * std::sqrt(96 / n));
  EXPECT_NEAR(neighbours / n, 0, 4 / std::sqrt(n));
  EXPECT_NEAR(static_cast<double>(within_one) / n, std::erf(std::sqrt(0.5)),
              4 * 0.466 / std::sqrt(n));
}

// The number of an index, from its definition in float64.
double number_at(std::uint64_t index, std::uint64_t seed, Operand operand) {
  const std::uint64_t counter = index / 4;
  const PhiloxCounter words =
      philox({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32U),
              static_cast<std::uint32_t>(operand), 0x74656e73},
             philox_key(seed));
  const std::size_t pair = index % 4 / 2 * 2;
  const double radius = std::sqrt(-2 * std::log((words[pair] + 0.5) / 4294967296.0));
  const double angle = 2 * std::acos(-1.0) * words[pair + 1] / 4294967296.0;
  return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

TEST(RandomTensor, NumbersAreThoseOfTheGenerator) {
  const Extents shape{1, 20000, 1, 53};
  const Tensor tensor = all_of(shape, DType::float32, 5, Operand::key);
  for (std::int64_t i = 0; i < shape.product(); ++i) {
    const double expected = number_at(static_cast<std::uint64_t>(i), 5, Operand::key);
    // Relative, however small the number: neither logarithm nor angle may cancel.
    ASSERT_NEAR(tensor.view().as<float>()[i], expected, 4e-7 * std::abs(expected)) << i;
  }
}

TEST(RandomTensor, EveryPieceOfARowIsTheSame) {
  const Extents shape{2, 150};
  const Tensor all = all_of(shape, DType::float32, 9, Operand::query);
  for (std::int64_t begin = 0; begin < 9; ++begin) {
    for (std::int64_t count = 1; begin + count <= shape[1]; count += 1 + count / 7) {
      for (const std::int64_t stride : {1, 3}) {
        const std::int64_t length = (count + stride - 1) / stride;
        const Index index{PositionRanges({{GlobalPosition(1), 1}}),
                          PositionRanges({{GlobalPosition(begin), length, stride}})};
        const Tensor piece = part(index, shape, DType::float32, 9, Operand::query);
        for (std::int64_t i = 0; i < length; ++i) {
          ASSERT_EQ(piece.view().at<float>({0, i}), all.view().at<float>({1, begin + i * stride}))
              << begin << " + " << i << " * " << stride;
        }
      }
    }
  }
}

TEST(RandomTensor, CountersHaveMoreThan32Bits) {
  const std::int64_t boundary = std::int64_t{1} << 34;  // where the low word of the counter wraps
  const Extents shape{2 * boundary};
  const Index index{PositionRanges({{GlobalPosition(boundary - 21), 50}})};
  const Tensor tensor = part(index, shape, DType::float32, 1, Operand::value);
  for (std::int64_t i = 0; i < 50; ++i) {
    const auto position = static_cast<std::uint64_t>(boundary - 21 + i);
    EXPECT_FLOAT_EQ(tensor.view().as<float>()[i],
                    static_cast<float>(number_at(position, 1, Operand::value)));
  }
}

TEST(RandomTensor, ThreadsDoNotMatter) {
  const Extents shape{2, 37, 3, 13};
  const Tensor one = all_of(shape, DType::bfloat16, 1, Operand::query);
  const Tensor many(DType::bfloat16, shape, memory);
  fill_random(many.view(), whole(shape), shape, 1, Operand::query, 5);
  EXPECT_TRUE(same_bits(one, many));
}

// Ranks of one job may run on different CPUs.
TEST(RandomTensor, EveryInstructionSetMakesTheSameBits) {
  const Extents shape{1, 2000, 3, 61};
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    const Tensor best = all_of(shape, dtype, 4, Operand::value);
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
      hwy::SetSupportedTargetsForTest(target);
      const Tensor other = all_of(shape, dtype, 4, Operand::value);
      hwy::SetSupportedTargetsForTest(0);
      EXPECT_TRUE(same_bits(best, other)) << hwy::TargetName(target) << ", " << name_of(dtype);
    }
  }
}

TEST(RandomTensor, EmptyShardsAreFine) {
  const Extents shape{2, 0, 3, 4};
  EXPECT_EQ(all_of(shape, DType::float32, 1, Operand::query).bytes(), 0U);
}

TEST(RandomTensor, RefusesAnIndexThatDoesNotFit) {
  const Extents shape{1, 4, 1, 2};
  const Tensor tensor(DType::float32, {1, 3, 1, 2}, memory);
  EXPECT_THROW(fill_random(tensor.view(), whole(shape), shape, 1, Operand::query), InternalError);
}

}  // namespace
}  // namespace annulus::verification
