#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>

#include "tests/support/for_each_index.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using Index = std::vector<std::int64_t>;

std::int64_t offset_of(const Index& index, const Extents& strides) {
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * strides[static_cast<int>(i)];
  return offset;
}

TEST(Extents, BasicsAndText) {
  const Extents shape{2, 8, 64};
  EXPECT_EQ(shape.rank(), 3);
  EXPECT_EQ(shape.product(), 1024);
  EXPECT_EQ(to_string(shape), "[2, 8, 64]");
  EXPECT_EQ(to_string(Extents{}), "[]");
  EXPECT_EQ(Extents{}.product(), 1);
  EXPECT_EQ((Extents{3, 0, 2}).product(), 0);
  EXPECT_EQ(shape, (Extents{2, 8, 64}));
  EXPECT_FALSE(shape == (Extents{2, 8}));
  EXPECT_FALSE(shape == (Extents{2, 8, 63}));
  EXPECT_EQ(contiguous_strides(shape), (Extents{512, 64, 1}));
  EXPECT_THROW((Extents{1, 1, 1, 1, 1, 1, 1}), ArgumentError);
}

TEST(TensorView, SliceAndPermuteAgainstBruteForce) {
  std::vector<std::int32_t> data(4 * 5 * 6);
  std::iota(data.begin(), data.end(), 0);
  const TensorView view(data.data(), DType::int32, {4, 5, 6});
  const TensorView part = view.slice(1, 2, 3).slice(0, 1, 2).permute({2, 0, 1});
  EXPECT_EQ(part.shape(), (Extents{6, 2, 3}));
  EXPECT_FALSE(part.is_contiguous());
  EXPECT_EQ(part.elements(), 36);
  EXPECT_EQ(part.bytes(), 144U);
  for (std::int64_t a = 0; a < 6; ++a) {
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t c = 0; c < 3; ++c) {
        EXPECT_EQ(part.at<std::int32_t>({a, b, c}), (b + 1) * 30 + (c + 2) * 6 + a);
      }
    }
  }
  part.at<std::int32_t>({5, 1, 2}) = -1;
  EXPECT_EQ(data[2 * 30 + 4 * 6 + 5], -1);
  EXPECT_EQ(view.slice(2, 6, 0).elements(), 0);
}

// Plans are prepared before there is memory; the offset then says how a slice will be aligned.
TEST(TensorView, SlicesWithoutMemoryKeepTheirOffset) {
  const TensorView view(nullptr, DType::float32, {4, 8});
  const auto address = [](const TensorView& slice) {
    return reinterpret_cast<std::uintptr_t>(slice.data());
  };
  EXPECT_EQ(address(view.slice(0, 0, 2)), 0);
  EXPECT_EQ(address(view.slice(0, 2, 2).slice(1, 3, 5)), (2 * 8 + 3) * sizeof(float));
}

TEST(Strides, NestedOnesKeepElementsApart) {
  const Extents shape{2, 3, 1, 4};
  EXPECT_TRUE(has_nested_strides(shape, contiguous_strides(shape)));
  EXPECT_TRUE(has_nested_strides(shape, {4, 8, 0, 1})) << "in any order; one element has no stride";
  EXPECT_TRUE(has_nested_strides(shape, {100, 10, 7, 2})) << "with gaps";
  EXPECT_TRUE(has_nested_strides(shape, {-12, 4, 4, 1})) << "backwards";
  EXPECT_FALSE(has_nested_strides(shape, {12, 0, 4, 1})) << "expanded";
  EXPECT_FALSE(has_nested_strides(shape, {12, 3, 3, 1})) << "overlapping";
  EXPECT_FALSE(has_nested_strides(shape, {8, 4, 4, 1})) << "overlapping further out";
  EXPECT_TRUE(has_nested_strides({2, 0}, {0, 0})) << "nothing";
}

TEST(TensorView, ReadsOnlyItsOwnType) {
  float value = 2.5F;
  const TensorView view(&value, DType::float32, {1});
  EXPECT_EQ(*view.as<float>(), 2.5F);
  const ConstTensorView read = view;
  EXPECT_EQ(read.as<float>(), &value);
  EXPECT_THAT(test::message_of<InternalError>([&] { (void)read.as<double>(); }),
              ::testing::HasSubstr("float32 read as float64"));
}

// A layout of `shape` with dimensions in random memory order and random gaps.
struct RandomLayout {
  Extents strides;
  std::int64_t span = 1;  // elements from the first to behind the last
};
RandomLayout random_layout(const Extents& shape, std::mt19937& random) {
  std::vector<int> order(static_cast<std::size_t>(shape.rank()));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  RandomLayout layout{shape, 1};
  for (const int dim : order) {
    layout.strides[dim] = layout.span;
    layout.span *= std::max<std::int64_t>(shape[dim], 1);
    if (random() % 2 == 0) layout.span += random() % 3;
  }
  return layout;
}

template <class T>
void check_copies(DType dtype) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int64_t> sizes(random() % 5);
    for (auto& size : sizes) size = static_cast<std::int64_t>(random() % 5);
    const Extents shape{std::span<const std::int64_t>(sizes)};
    const RandomLayout from = random_layout(shape, random);
    const RandomLayout to = random_layout(shape, random);
    std::vector<T> source(static_cast<std::size_t>(from.span));
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<T>(i % 100 + 1);
    std::vector<T> expected(static_cast<std::size_t>(to.span), T(0));
    std::vector<T> actual = expected;
    test::for_each_index(shape, [&](const Index& index) {
      expected[static_cast<std::size_t>(offset_of(index, to.strides))] =
          source[static_cast<std::size_t>(offset_of(index, from.strides))];
    });
    copy(ConstTensorView(source.data(), dtype, shape, from.strides),
         TensorView(actual.data(), dtype, shape, to.strides));
    // The gaps too: a copy writes its elements and nothing else.
    ASSERT_EQ(actual, expected) << to_string(shape) << " " << to_string(from.strides) << " -> "
                                << to_string(to.strides);
  }
}

TEST(TensorCopy, RandomStridesBytes) {
  check_copies<std::uint8_t>(DType::uint8);
}
TEST(TensorCopy, RandomStridesFloats) {
  check_copies<float>(DType::float32);
}
TEST(TensorCopy, RandomStridesDoubles) {
  check_copies<double>(DType::float64);
}

TEST(TensorCopy, BroadcastSource) {
  const std::vector<float> row{1, 2, 3};
  std::vector<float> rows(6);
  copy(ConstTensorView(row.data(), DType::float32, {2, 3}, {0, 1}),
       TensorView(rows.data(), DType::float32, {2, 3}));
  EXPECT_THAT(rows, ::testing::ElementsAre(1, 2, 3, 1, 2, 3));
}

TEST(TensorCopy, RefusesMismatch) {
  std::array<float, 6> data{};
  const TensorView a(data.data(), DType::float32, {2, 3});
  EXPECT_THROW(copy(a, TensorView(data.data(), DType::float32, {3, 2})), InternalError);
  EXPECT_THROW(copy(a, TensorView(data.data(), DType::int32, {2, 3})), InternalError);
}

TEST(Tensor, NamesItselfWhereThereIsNoMemory) {
  HostMemoryPool pool;
  EXPECT_THAT(test::message_of<LibraryError>([&] {
                const Tensor large(DType::float32, {2, std::int64_t{1} << 56}, pool);
              }),
              ::testing::StartsWith(
                  "tensor [2, 72057594037927936] of float32: cpu: no memory for 512 PiB: "));
}

TEST(Tensor, OwnsPoolMemory) {
  HostMemoryPool pool;
  {
    Tensor tensor(DType::float16, {3, 5}, pool);
    EXPECT_EQ(tensor.bytes(), 30U);
    EXPECT_EQ(tensor.dtype(), DType::float16);
    EXPECT_TRUE(tensor.view().is_contiguous());
    tensor.fill_zero();
    for (int i = 0; i < 15; ++i) EXPECT_EQ(tensor.view().as<Float16>()[i].bits, 0U);
    const Tensor empty(DType::float32, {0, 4}, pool);
    EXPECT_EQ(empty.bytes(), 0U);
  }
  EXPECT_EQ(pool.statistics().in_use, 0U);
}

}  // namespace
}  // namespace annulus
