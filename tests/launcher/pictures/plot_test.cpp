#include "launcher/pictures/plot.hpp"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Plot, DrawsCurvesOnLogarithmicAndLinearAxes) {
  const Curve curve{"strong", {{1, 8}, {2, 4}, {4, 2}}};
  const Curve ideal{"ideal", {{1, 8}, {4, 2}}, true};
  const std::string text = plot_picture({{"Time", "ranks", "time (ms)", true, {curve, ideal}},
                                         {"Rate", "ranks", "rate", false, {curve}}},
                                        "A study", "a note");
  // Equal factors are equal distances: 210 pixels in x.
  EXPECT_THAT(text, HasSubstr("points=\"76.0,"));
  EXPECT_THAT(text, HasSubstr(" 286.0,"));
  EXPECT_THAT(text, HasSubstr(" 496.0,"));
  EXPECT_THAT(text, HasSubstr("class=\"curve ideal c1\""));
  // The second panel begins 520 pixels further; 8, 4 and 2 of 8.64 are up to 277.8 pixels high.
  EXPECT_THAT(text, HasSubstr("points=\"596.0,84.2 806.0,223.1 1016.0,292.6\""));
  for (const char* word : {">A study<", ">a note<", ">Time<", ">Rate<", ">strong<", ">ideal<",
                           ">time (ms)<", ">ranks<", ">1<", ">2<", ">4<"}) {
    EXPECT_THAT(text, HasSubstr(word));
  }
  EXPECT_THAT(text, Not(HasSubstr("nan")));
}

TEST(Plot, OnePointLiesInTheMiddle) {
  const std::string text =
      plot_picture({{"Time", "ranks", "ms", true, {{"strong", {{1, 8}}}}}}, "A study", "");
  EXPECT_THAT(text, HasSubstr("cx=\"286\""));
  EXPECT_THAT(text, Not(HasSubstr("nan")));
}

// A problem without visible pairs takes no time, and has a rate of 0 or none.
TEST(Plot, CurvesOfNothingAreDrawn) {
  const std::string text = plot_picture({{"Time", "ranks", "ms", true, {{"strong", {}}}},
                                         {"Rate", "ranks", "rate", false, {{"strong", {}}}},
                                         {"Rate", "ranks", "rate", false, {{"weak", {{1, 0}}}}}},
                                        "A study", "");
  EXPECT_THAT(text, HasSubstr(">strong<"));
  EXPECT_THAT(text, HasSubstr("cy=\"362\""));  // the weak rate, on the axis
  EXPECT_THAT(text, Not(HasSubstr("nan")));
  EXPECT_THAT(text, Not(HasSubstr("inf")));
}

}  // namespace
}  // namespace annulus::launcher
