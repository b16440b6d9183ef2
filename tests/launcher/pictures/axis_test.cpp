#include "launcher/pictures/axis.hpp"

#include <limits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

TEST(Axis, TicksAreRoundAndAboutFive) {
  for (double end = 1e-4; end < 1e5; end *= 1.37) {
    const std::vector<double> ticks = linear_ticks(end);
    EXPECT_GE(ticks.size(), 5U) << end;
    EXPECT_LE(ticks.size(), 11U) << end;
    EXPECT_EQ(ticks.front(), 0);
    EXPECT_LE(ticks.back(), end * (1 + 1e-9));
  }
  EXPECT_EQ(linear_ticks(10), (std::vector<double>{0, 2.5, 5, 7.5, 10}));
  EXPECT_EQ(linear_ticks(6), (std::vector<double>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(Axis, TicksOfPowersAreRound) {
  EXPECT_EQ(logarithmic_ticks(1, 1000), (std::vector<double>{1, 10, 100, 1000}));
  EXPECT_EQ(logarithmic_ticks(1.5, 30), (std::vector<double>{2, 5, 10, 20}));
  EXPECT_EQ(logarithmic_ticks(5, 5), (std::vector<double>{5}));
  EXPECT_GT(logarithmic_ticks(5e-324, 1e308).size(), 600U);
}

TEST(Axis, WithoutExtentHasNoTicks) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const double end : {0.0, -1.0, 5e-324, kInfinity, -kInfinity, kNan}) {
    EXPECT_TRUE(linear_ticks(end).empty()) << end;
  }
  for (const auto& [least, most] : std::vector<std::pair<double, double>>{{0, 0},
                                                                          {0, 1},
                                                                          {-1, 1},
                                                                          {2, 1},
                                                                          {1, kInfinity},
                                                                          {kInfinity, -kInfinity},
                                                                          {kNan, 1},
                                                                          {1, kNan}}) {
    EXPECT_TRUE(logarithmic_ticks(least, most).empty()) << least << ' ' << most;
  }
}

TEST(Axis, UnitsFollowTheTime) {
  EXPECT_EQ(time_unit(5e-6).name, "µs");
  EXPECT_EQ(time_unit(5e-3).name, "ms");
  EXPECT_EQ(time_unit(5).name, "s");
  EXPECT_EQ(time_unit(5).seconds, 1);
}

}  // namespace
}  // namespace annulus::launcher
