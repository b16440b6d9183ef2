#include <cmath>
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_info.hpp>
#include <annulus/verification/random_scores.hpp>

#include "tests/support/message_of.hpp"

namespace annulus::verification {
namespace {

using ::testing::HasSubstr;

const Extents kShape{2, 3, 20, 30};

template <class Entry>
std::vector<Entry> filled(const FillPart& fill, DType dtype,
                          const std::vector<PositionRanges>& index = files::whole(kShape)) {
  Extents shape = kShape;
  for (int dim = 0; dim < 4; ++dim) shape[dim] = index[static_cast<std::size_t>(dim)].size();
  std::vector<Entry> entries(static_cast<std::size_t>(shape.product()));
  fill({entries.data(), dtype, shape}, index);
  return entries;
}

// The entries at rows 5, 8 and 11 of head 1 and keys from 7 on must equal the whole's.
template <class Entry>
void expect_parts_agree(const FillPart& fill, DType dtype) {
  std::vector<PositionRanges> index = files::whole(kShape);
  const std::vector<Entry> whole = filled<Entry>(fill, dtype);
  index[1] = PositionRanges({{GlobalPosition(1), 1, 1}});
  index[2] = PositionRanges({{GlobalPosition(5), 3, 3}});
  index[3] = PositionRanges({{GlobalPosition(7), 23, 1}});
  const std::vector<Entry> part = filled<Entry>(fill, dtype, index);
  std::size_t i = 0;
  for (std::size_t b = 0; b < 2; ++b) {
    for (std::size_t t = 5; t < 14; t += 3) {
      for (std::size_t s = 7; s < 30; ++s) {
        ASSERT_EQ(part[i++], whole[((b * 3 + 1) * 20 + t) * 30 + s]);
      }
    }
  }
}

TEST(RandomScores, AnEntryDependsOnItsPlaceAlone) {
  expect_parts_agree<float>(random_bias(kShape, 2, 5), DType::float32);
  expect_parts_agree<std::uint8_t>(random_mask(kShape, 0.4, 5), DType::boolean);
  EXPECT_NE(filled<float>(random_bias(kShape, 2, 5), DType::float32),
            filled<float>(random_bias(kShape, 2, 6), DType::float32));
}

TEST(RandomScores, DeviationAndDensityAreAsAskedFor) {
  double square = 0;
  for (const float entry : filled<float>(random_bias(kShape, 2, 5), DType::float32)) {
    square += entry * entry;
  }
  EXPECT_NEAR(std::sqrt(square / 3600), 2, 0.1);
  for (const double density : {0.0, 0.3, 1.0}) {
    double visible = 0;
    for (const std::uint8_t entry :
         filled<std::uint8_t>(random_mask(kShape, density, 5), DType::boolean)) {
      visible += entry;
    }
    EXPECT_NEAR(visible / 3600, density, 0.03);
  }
  EXPECT_THAT(test::message_of<ArgumentError>([] { (void)random_mask(kShape, 1.1, 5); }),
              HasSubstr("0 to 1"));
  EXPECT_THROW((void)random_mask(kShape, std::nan(""), 5), ArgumentError);
}

// Just the entries whose pairs are all hidden are not finite.
TEST(RandomScores, PoisonIsWhereNobodyLooks) {
  AttentionProblem problem;
  problem.shape = {2, 20, 30, 3, 1, 4, 4};
  problem.mask.set_causal(true);
  problem.bias = kShape;
  const FillPart bias = random_bias(kShape, 1, 5);
  const auto spoilt = [&](const FillPart& mask) {
    std::size_t count = 0;
    for (const float entry :
         filled<float>(non_finite_bias(problem, {bias, mask}), DType::float32)) {
      count += std::isfinite(entry) ? 0 : 1;
    }
    return count;
  };
  EXPECT_EQ(spoilt({}), 6U * (20 * 30 - 20 * 21 / 2));
  problem.dense_mask = Extents{2, 1, 1, 30};
  const FillPart nothing = [](const TensorView& part, std::span<const PositionRanges> /*index*/) {
    std::fill_n(static_cast<std::uint8_t*>(part.data()), part.elements(), 0);
  };
  EXPECT_EQ(spoilt(nothing), 3600U);
  problem.dense_mask.reset();
  problem.mask.set_segments(2, std::vector<std::int32_t>(40, 0), std::vector<std::int32_t>(60, 1));
  EXPECT_EQ(spoilt({}), 3600U);
}

// An entry that is broadcast over rows and heads is not finite only if it is hidden in all of them.
TEST(RandomScores, BroadcastEntriesAreSharedByTheirPairs) {
  AttentionProblem problem;
  problem.shape = {2, 20, 30, 3, 1, 4, 4};
  problem.mask.set_causal(true);
  problem.bias = Extents{1, 1, 1, 30};
  std::vector<float> entries(30);
  non_finite_bias(problem, {random_bias(*problem.bias, 1, 5), {}})(
      {entries.data(), DType::float32, *problem.bias}, files::whole(*problem.bias));
  for (std::size_t s = 0; s < 30; ++s) EXPECT_EQ(std::isfinite(entries[s]), s < 20);
}

TEST(RandomScores, ABiasMayHidePairsItself) {
  const FillPart mask = random_mask(kShape, 0.5, 9);
  const auto shows = filled<std::uint8_t>(mask, DType::boolean);
  const auto bias = random_bias(kShape, 1, 5);
  const auto plain = filled<float>(bias, DType::float32);
  const auto hiding = filled<float>(hiding_bias(bias, mask), DType::float32);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    ASSERT_EQ(hiding[i], shows[i] != 0 ? plain[i] : -INFINITY);
  }
}

}  // namespace
}  // namespace annulus::verification
