#include "launcher/report/explain.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// Only schedules with a predicted time were simulated.
TEST(Explain, SaysWhyAScheduleWasChosenAndOthersWerePassedOver) {
  ring::ScheduleChoice choice;
  choice.schedule = ring::Schedule::ring;
  choice.seconds = 1e-3;
  choice.passed_over = {{{ring::Schedule::hybrid, 2}, "predicted 2 ms", 2e-3},
                        {{ring::Schedule::local}, "keys are sharded along sp"}};
  Report report("plan", {}, {{"rank", ""}}, {});
  Explanation(report).add(choice);
  EXPECT_THAT(report.about(),
              ElementsAre(Pair("schedule chosen", "ring"),
                          Pair("schedule chosen because", HasSubstr("1 ms, the best of 2 ")),
                          Pair("schedule passed over, hybrid (ulysses degree 2)", "predicted 2 ms"),
                          Pair("schedule passed over, local", "keys are sharded along sp")));
}

// Lines name the pass.
TEST(Explain, AScheduleThatWasNamedHasNoOthers) {
  Report report("plan", {}, {{"rank", ""}}, {});
  ring::ScheduleChoice choice;
  choice.schedule = ring::Schedule::ring;
  Explanation(report, "backward ").add(choice);
  EXPECT_THAT(report.about(),
              ElementsAre(Pair("backward schedule chosen", "ring"),
                          Pair("backward schedule chosen because", "it was named")));
}

}  // namespace
}  // namespace annulus::launcher
