#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/philox.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

#include "native/row_dropout.hpp"
#include "tests/attention/native_run.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

GlobalPosition at(std::int64_t position) {
  return GlobalPosition(position);
}

// Which entries drop is part of the contract and must not change.
TEST(Dropout, IsThisFunctionOfPhilox) {
  const Dropout dropout(0.25, (std::uint64_t{7} << 32U) + 3);
  EXPECT_EQ(dropout.threshold(), 0x4000U);
  for (std::int64_t column = 64; column < 96; ++column) {
    // Counter 4 · 2 + pair; each eight columns have a word, and each column a half of it.
    const auto pair = static_cast<std::uint32_t>(column % 8 / 2);
    const PhiloxCounter words = philox({8 + pair, 11, 5, 0x64726f70 + 2}, {3, 7});
    const std::uint32_t word = words[static_cast<std::size_t>((column - 64) / 8)];
    const std::uint32_t bits = column % 2 == 0 ? word & 0xffffU : word >> 16U;
    EXPECT_EQ(dropout.drops(2, 5, at(11), at(column)), bits < 0x4000U) << column;
  }
}

TEST(Dropout, DropsAsOftenAsAskedAndIndependently) {
  constexpr std::int64_t kEntries = 200000;
  for (const double probability : {0.1, 0.3, 0.9}) {
    const Dropout dropout(probability, 1);
    EXPECT_NEAR(dropout.probability(), probability, std::ldexp(0.5, -16));
    EXPECT_DOUBLE_EQ(dropout.keep_scale(), 1 / (1 - dropout.probability()));
    // Neighbours in every direction, and another seed.
    struct Offset {
      std::int64_t batch, head, row, column;
      std::uint64_t seed;
    };
    for (const Offset& o : {Offset{1, 0, 0, 0, 0}, Offset{0, 1, 0, 0, 0}, Offset{0, 0, 1, 0, 0},
                            Offset{0, 0, 0, 1, 0}, Offset{0, 0, 0, 0, 1}}) {
      const Dropout other(probability, 1 + o.seed);
      double one = 0;
      double both = 0;
      for (std::int64_t i = 0; i < kEntries; ++i) {
        const std::int64_t row = i / 1000;
        const std::int64_t column = i % 1000 * (1 + o.column);
        const bool drops = dropout.drops(3, 2, at(row), at(column));
        one += drops ? 1 : 0;
        both += drops && other.drops(3 + o.batch, 2 + o.head, at(row + 1000 * o.row),
                                     at(column + o.column))
                    ? 1
                    : 0;
      }
      const auto expect_near = [&](double count, double p) {
        EXPECT_NEAR(count / kEntries, p, 5 * std::sqrt(p * (1 - p) / kEntries));
      };
      expect_near(one, probability);
      expect_near(both, probability * probability);
    }
  }
}

TEST(Dropout, SmallAndLargeProbabilitiesStayThemselves) {
  EXPECT_EQ(Dropout(0, 1).threshold(), 0U);
  EXPECT_EQ(Dropout(1e-9, 1).threshold(), 1U);
  EXPECT_EQ(Dropout(1 - 1e-9, 1).threshold(), 65535U);
  EXPECT_FALSE(Dropout(0, 1).drops(0, 0, at(0), at(0)));
  EXPECT_EQ(to_string(Dropout(0.25, 5)), "dropout 0.25, seed 5");
  EXPECT_EQ(to_string(Dropout(0.3, 5)), "dropout 0.3, seed 5") << "though it is rounded";
  for (const double wrong : {-0.1, 1.0, std::nan(""), 2.0}) {
    EXPECT_THAT(message_of<ArgumentError>([&] { Dropout(wrong, 1); }),
                AllOf(HasSubstr("dropout"), HasSubstr("from 0 to below 1")));
  }
}

// The vector code of the CPU kernel: tiles that begin anywhere, long ones too, and striped columns.
TEST(Dropout, RowsAreDroppedAsTheirEntriesAre) {
  const Dropout dropout(0.4, 77);
  for (const std::int64_t start : {0, 1, 31, 32, 1000, 4096 + 17}) {
    for (const std::int64_t stride : {1, 2, 3, 8, 64, 1000}) {
      for (const std::int64_t length : {0, 1, 7, 64, 512, 700, 1500}) {
        const PositionRange columns{at(start), length, stride};
        const auto size = static_cast<std::size_t>(length);
        std::vector<float> weights(size);
        std::vector<std::uint16_t> high(size);
        for (std::size_t i = 0; i < size; ++i) {
          weights[i] = 1 + static_cast<float>(i);
          high[i] = static_cast<std::uint16_t>(1 + i);
        }
        std::vector<std::uint16_t> low = high;
        drop_row(dropout, 4, 6, at(123456), columns, {.floats = weights.data()});
        drop_row(dropout, 4, 6, at(123456), columns, {.parts = {high.data(), low.data()}});
        for (std::int64_t j = 0; j < length; ++j) {
          const auto i = static_cast<std::size_t>(j);
          const bool drops = dropout.drops(4, 6, at(123456), columns.at(j));
          ASSERT_EQ(weights[i], drops ? 0 : static_cast<float>(1 + j))
              << start << " " << stride << " " << j;
          ASSERT_EQ(high[i], drops ? 0 : 1 + j) << start << " " << stride << " " << j;
          ASSERT_EQ(low[i], drops ? 0 : 1 + j) << start << " " << stride << " " << j;
        }
      }
    }
  }
}

// The probability becomes 0, and 0 · NaN is NaN.
TEST(Dropout, ADroppedNanStaysOne) {
  Random random(6);
  AttentionProblem problem = problem_of({1, 40, 40, 1, 1, 4, 4});
  problem.dropout.emplace(0.5, 3);
  WholeAttention whole = random_attention(random, problem);
  whole.value.view().at<float>({0, 7, 0, 2}) = std::nanf("");
  for (const bool causal : {false, true}) {
    whole.problem.mask.set_causal(causal);
    const Result result = run_native(whole.problem, whole.block());
    const OracleOutput truth = whole.oracle();
    for (std::int64_t t = 0; t < 40; ++t) {
      const bool sees = !causal || t >= 7;
      EXPECT_EQ(std::isnan(truth.output[static_cast<std::size_t>(4 * t + 2)]), sees) << t;
      EXPECT_EQ(std::isnan(result.output.view().at<float>({0, t, 0, 2})), sees) << t;
      EXPECT_FALSE(std::isnan(result.output.view().at<float>({0, t, 0, 1}))) << t;
    }
  }
}

}  // namespace
}  // namespace annulus::test
