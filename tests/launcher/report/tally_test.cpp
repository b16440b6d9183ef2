#include "launcher/report/tally.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

using ::testing::EndsWith;
using ::testing::StartsWith;

verification::Verification good() {
  verification::Verification found;
  found.bound.output = 1e-3;
  found.sharded = {2e-4, 1e-6, 0.25, 0.5};
  found.unsharded = found.sharded;
  found.allowance = 2.2e-4;
  found.implementations = "native";
  return found;
}

TEST(Tally, CountsWhatPasses) {
  Tally tally;
  tally.add(good());
  tally.add(good());
  tally.add_unordered();
  EXPECT_TRUE(tally.passed());
  EXPECT_EQ(tally.computed(), "native 2");
  EXPECT_EQ(tally.text(),
            "OK (2 of 2 within bounds; largest share of a row's bound 0.25, of its LSE's 0.50; "
            "largest ratio to the unsharded error 1.00; 1 more refused)");
}

// If only bits differ, the numbers still count as within bounds.
TEST(Tally, SaysWhatFailed) {
  Tally tally;
  tally.add(good());
  verification::Verification other = good();
  other.repeats = false;
  tally.add(other);
  EXPECT_FALSE(tally.passed());
  EXPECT_THAT(tally.text(), StartsWith("FAILED (2 of 2 within bounds, 1 with different bits in a "
                                       "repeated run; largest share"));
  other = good();
  other.reproduces = false;
  tally.add(other);
  other = good();
  other.sharded.output = 2.3e-4;
  tally.add(other);
  other.sharded.output = 2e-3;
  other.repeats = false;
  EXPECT_EQ(other.failure(),
            "output error 2.00e-03 above 1.00e-03; a repeated run gave different bits");
  tally.add(other);
  tally.add_refused();
  EXPECT_THAT(tally.text(),
              StartsWith("FAILED (3 of 6 within bounds, 1 above a bound, 1 too far above the "
                         "unsharded error, 2 with different bits in a repeated run, 1 with other "
                         "bits than the unsharded run, 1 not computed; largest share"));
}

TEST(Tally, GradientsCountWithTheirProblem) {
  verification::Verification found = good();
  found.gradients.emplace();
  found.gradients->implementations = "native";
  found.gradients->bound = 1e-3;
  found.gradients->sharded = {5e-4, 0, 0, 0, 0};
  found.gradients->repeats = false;
  found.repeats = false;
  Tally tally;
  tally.add(found);
  EXPECT_EQ(tally.computed_gradients(), "native 1");
  EXPECT_THAT(tally.text(), StartsWith("FAILED (1 of 1 within bounds, 1 with different bits in a "
                                       "repeated run; "));
  EXPECT_THAT(tally.text(), EndsWith(", of a gradient's 0.50; largest ratio to the unsharded error "
                                     "1.00)"));
}

}  // namespace
}  // namespace annulus::launcher
