// Choices for a scope, in the public interface.
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/error.hpp>

#include "tests/support/host_context.hpp"

namespace annulus {
namespace {

class OverlayTest : public ::testing::Test {
 protected:
  OverlayTest() : context_(test::session().world(), test::on_host()) {
    options_.shape = {1, 64, 64, 8, 8, 16, 16};
    options_.dtype = DType::float32;
  }
  [[nodiscard]] std::string schedule() {
    const Attention attention(context_, options_);
    return std::string(ring::name_of(attention.schedule().schedule));
  }

  Context context_;
  AttentionOptions options_;
};

TEST_F(OverlayTest, CountsInItsScopeAndTheInnerOneFirst) {
  const std::string defaults = schedule();
  {
    const Overlay outer(context_, {.schedule = "allgather"});
    EXPECT_EQ(schedule(), "allgather");
    {
      const Overlay inner(context_, {.schedule = "ring"});
      EXPECT_EQ(schedule(), "ring");
      const Overlay other(context_, {.implementation = "native"});
      EXPECT_EQ(schedule(), "ring") << "member by member";
      EXPECT_EQ(context_.overlay().implementation, "native");
    }
    EXPECT_EQ(schedule(), "allgather");
    options_.schedule = "ulysses";
    EXPECT_EQ(schedule(), "ulysses") << "what the caller names comes first";
    options_.schedule = "auto";
  }
  EXPECT_TRUE(context_.overlay().is_open());
  EXPECT_EQ(schedule(), defaults);
}

TEST_F(OverlayTest, DoesNotChangeWhatIsThereAlready) {
  auto overlay = std::make_unique<Overlay>(context_, ring::Choice{.schedule = "allgather"});
  const Attention attention(context_, options_);
  overlay.reset();
  EXPECT_EQ(attention.schedule().schedule, ring::Schedule::allgather);
}

// In any order, as objects on the heap may end.
TEST_F(OverlayTest, EndsInAnyOrder) {
  auto first = std::make_unique<Overlay>(context_, ring::Choice{.schedule = "allgather"});
  const Overlay second(context_, {.schedule = "ring"});
  first.reset();
  EXPECT_EQ(schedule(), "ring");
}

TEST_F(OverlayTest, WhatCannotRunIsAnErrorAsIfItWereNamed) {
  const Overlay overlay(context_, {.implementation = "no such kernel"});
  EXPECT_THROW((void)schedule(), UserError);
}

// The context has a cache for all attention that is made on it.
TEST_F(OverlayTest, AContextRemembersWhatWasTuned) {
  if (context_.size() == 1) GTEST_SKIP() << "one rank has no choice";
  options_.tuning.policy = ring::TuningPolicy::cached;
  options_.tuning.file = "/nonexistent/tuning.json";
  {
    const Attention attention(context_, options_);
    EXPECT_EQ(attention.decision().by, ring::DecidedBy::heuristics);
  }
  options_.tuning.policy = ring::TuningPolicy::measure;
  options_.tuning.runs = 1;
  options_.tuning.factor = 100;
  options_.tuning.file = "/proc/tuning.json";  // cannot be made
  const Attention first(context_, options_);
  EXPECT_EQ(first.decision().by, ring::DecidedBy::measurement);
  EXPECT_EQ(first.decision().warnings.empty(), context_.rank() != 0);
  const Attention second(context_, options_);
  EXPECT_EQ(second.decision().by, ring::DecidedBy::memory);
  EXPECT_EQ(second.decision().choice, first.decision().choice);
}

}  // namespace
}  // namespace annulus
