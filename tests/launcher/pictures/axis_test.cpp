#include "launcher/pictures/axis.hpp"

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

TEST(Axis, UnitsFollowTheTime) {
  EXPECT_EQ(time_unit(5e-6).name, "µs");
  EXPECT_EQ(time_unit(5e-3).name, "ms");
  EXPECT_EQ(time_unit(5).name, "s");
  EXPECT_EQ(time_unit(5).seconds, 1);
}

}  // namespace
}  // namespace annulus::launcher
