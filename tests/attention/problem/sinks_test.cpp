#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Lt;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Sinks, EachHeadHasItsOwnOrAllHaveTheSame) {
  const Sinks own({2, 3}, {1, 2, 3, 4, 5, 6});
  EXPECT_THAT(own.of_head(0), ElementsAre(1, 2, 3));
  EXPECT_THAT(own.of_head(1), ElementsAre(4, 5, 6));
  EXPECT_EQ(own.per_head(), 3);
  const Sinks shared({3}, {1, 2, 3});
  EXPECT_THAT(shared.of_head(7), ElementsAre(1, 2, 3));
  EXPECT_EQ(shared.per_head(), 3);
  EXPECT_EQ(to_string(own), "sinks [2, 3]");
}

TEST(Sinks, TheirLogSumExp) {
  const Sinks sinks({4, 2}, {0, 0, 300, 300, 1, -kInfinity, -kInfinity, -kInfinity});
  EXPECT_DOUBLE_EQ(sinks.lse(0), std::log(2.0));
  EXPECT_DOUBLE_EQ(sinks.lse(1), 300 + std::log(2.0));
  EXPECT_DOUBLE_EQ(sinks.lse(2), 1);
  EXPECT_EQ(sinks.lse(3), -kInfinity);
}

TEST(Sinks, DifferWhereAnythingDiffers) {
  const Sinks sinks({2, 2}, {1, 2, 3, 4});
  EXPECT_EQ(sinks, Sinks({2, 2}, {1, 2, 3, 4}));
  EXPECT_EQ(sinks.digest(), Sinks({2, 2}, {1, 2, 3, 4}).digest());
  for (const Sinks& other : {Sinks({2, 2}, {1, 2, 3, 5}), Sinks({4}, {1, 2, 3, 4}),
                             Sinks({4, 1}, {1, 2, 3, 4}), Sinks({2, 2}, {2, 1, 3, 4})}) {
    EXPECT_FALSE(sinks == other);
    EXPECT_NE(sinks.digest(), other.digest());
  }
}

TEST(Sinks, DrawnOnesAreTheSameForASeed) {
  const Sinks drawn = Sinks::random(8, 4, 5);
  EXPECT_EQ(drawn.shape(), (Extents{8, 4}));
  EXPECT_EQ(drawn, Sinks::random(8, 4, 5));
  EXPECT_FALSE(drawn == Sinks::random(8, 4, 6));
  EXPECT_FALSE(
      std::equal(drawn.of_head(0).begin(), drawn.of_head(0).end(), drawn.of_head(1).begin()));
  for (std::int64_t head = 0; head < 8; ++head) {
    EXPECT_THAT(drawn.of_head(head), Each(AllOf(Ge(-2), Lt(2))));
  }
}

TEST(Sinks, Errors) {
  const auto message = [](const Extents& shape, std::vector<float> logits) {
    return message_of<ArgumentError>([&] { Sinks(shape, std::move(logits)).validate(4); });
  };
  EXPECT_THAT(message({2, 1, 1}, {1, 2}), AllOf(HasSubstr("sinks"), HasSubstr("[N,M] or [M]")));
  EXPECT_THAT(message({}, {1}), HasSubstr("[N,M] or [M]"));
  EXPECT_THAT(message({4, 0}, {}), AllOf(HasSubstr("[4, 0]"), HasSubstr("[N,M] or [M]")));
  EXPECT_THAT(message({4, 1}, {1, 2}), AllOf(HasSubstr("2 logits"), HasSubstr("4 for shape")));
  EXPECT_THAT(message({3}, {1, 2, std::nanf("")}),
              AllOf(HasSubstr("nan at index 2"), HasSubstr("finite")));
  EXPECT_THAT(message({3}, {1, kInfinity, 3}),
              AllOf(HasSubstr("inf at index 1"), HasSubstr("finite")));
  EXPECT_THAT(message({2, 1}, {1, 2}), AllOf(HasSubstr("[2, 1]"), HasSubstr("N = 4 query heads")));
  EXPECT_EQ(message({4, 1}, {1, 2, 3, -kInfinity}), "nothing thrown");
}

}  // namespace
}  // namespace annulus::test
