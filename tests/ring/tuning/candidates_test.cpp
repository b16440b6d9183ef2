// Which plans are worth timing, and what a call leaves open.
#include "tuning/candidates.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/ring/simulate.hpp>

#include "tests/ring/tuning/planned_call.hpp"
#include "tuning/autotune.hpp"

namespace annulus::ring {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr TuningOptions kAll{.factor = 1e9, .candidates = 1000};

std::vector<TunedCandidate> candidates_of(PlannedCall& call, const TuningOptions& limits = kAll) {
  const PlanInput input = call.input();
  return tuning_candidates(input, call.open(input), call.options.schedule, {}, limits);
}

std::set<std::string> schedules_of(const std::vector<TunedCandidate>& candidates) {
  std::set<std::string> names;
  for (const TunedCandidate& one : candidates) names.insert(one.choice.schedule);
  return names;
}

TEST(TuningCandidates, AreAllPlansThatCanBeMade) {
  PlannedCall call(8);
  call.problem.shape.query_length = call.problem.shape.kv_length = 32768;
  call.node_of_rank = {0, 0, 0, 0, 1, 1, 1, 1};
  const std::vector<TunedCandidate> all = candidates_of(call);
  EXPECT_THAT(schedules_of(all),
              (std::set<std::string>{"ring", "double_ring", "ulysses", "hybrid", "allgather"}));
  std::set<int> degrees, inner;
  std::set<std::string> implementations;
  std::set<std::int64_t> groups;
  for (const TunedCandidate& one : all) {
    EXPECT_EQ(one.reason, "");
    EXPECT_GT(one.predicted, 0);
    degrees.insert(one.choice.ulysses_degree);
    inner.insert(one.choice.inner_size);
    implementations.insert(one.choice.implementation);
    groups.insert(one.choice.head_group_bytes);
  }
  EXPECT_THAT(degrees, Contains(2));
  EXPECT_THAT(degrees, Contains(4));
  EXPECT_THAT(inner, Contains(4)) << "ranks of a node";
  EXPECT_THAT(implementations, Contains("slow"));
  EXPECT_GT(groups.size(), 1U);
}

// The variants that auto looks at.
TEST(TuningCandidates, AreTheVariantsOfThePlanner) {
  PlannedCall call(8);
  const PlanInput input = call.input();
  std::set<std::string> considered, candidates;
  for (const ConsideredVariant& one : variants_for(input, "auto")) {
    if (one.is_open()) considered.insert(variant_text(one.variant));
  }
  for (const TunedCandidate& one : candidates_of(call)) {
    candidates.insert(variant_text(
        {parse_schedule(one.choice.schedule), one.choice.ulysses_degree, one.choice.inner_size}));
  }
  EXPECT_EQ(candidates, considered);
  EXPECT_THAT(considered, Contains("hybrid (ulysses degree 4)"));
}

TEST(TuningCandidates, BeginWithTheHeuristicsAndTheBestOfEachSchedule) {
  PlannedCall call(8);
  const PlanInput input = call.input();
  const std::vector<TunedCandidate> all = candidates_of(call);
  EXPECT_EQ(all[0].choice.schedule, name_of(choose_schedule(input, "auto").schedule));
  EXPECT_EQ(all[0].choice.implementation, "");
  const std::size_t schedules = schedules_of(all).size();
  const std::vector<TunedCandidate> first(all.begin(),
                                          all.begin() + static_cast<std::ptrdiff_t>(schedules));
  EXPECT_EQ(schedules_of(first).size(), schedules);
  const auto in_order = [](const TunedCandidate& a, const TunedCandidate& b) {
    return a.predicted < b.predicted;
  };
  EXPECT_TRUE(std::is_sorted(all.begin() + 1, all.begin() + static_cast<std::ptrdiff_t>(schedules),
                             in_order));
  EXPECT_TRUE(
      std::is_sorted(all.begin() + static_cast<std::ptrdiff_t>(schedules), all.end(), in_order));
}

// The predicted time of a choice is that of its plan.
TEST(TuningCandidates, ArePredictedByTheirPlans) {
  PlannedCall call(8);
  const PlanInput input = call.input();
  for (const TunedCandidate& one : candidates_of(call)) {
    const PlanInput chosen = with_choice(input, one.choice);
    EXPECT_EQ(
        predicted_seconds(make_plan(chosen, parse_schedule(one.choice.schedule)), chosen.prices),
        one.predicted)
        << choice_text(one.choice);
  }
}

TEST(TuningCandidates, AreLimited) {
  PlannedCall call(8);
  const auto timed = [](const std::vector<TunedCandidate>& all) {
    return std::count_if(all.begin(), all.end(),
                         [](const auto& one) { return one.reason.empty(); });
  };
  const std::vector<TunedCandidate> few = candidates_of(call, {.factor = 1e9, .candidates = 3});
  EXPECT_EQ(timed(few), 3);
  EXPECT_EQ(few[3].reason, "only 3 are timed");
  const std::vector<TunedCandidate> best = candidates_of(call, {.factor = 1, .candidates = 1000});
  EXPECT_LE(timed(best), 2) << "the best and, if it is another, that of the heuristics";
  EXPECT_THAT(best.back().reason, HasSubstr("more than 1 times"));
}

TEST(TuningCandidates, LeaveAloneWhatIsNamed) {
  PlannedCall call(8);
  call.options.schedule = "hybrid";
  call.options.plan.emplace().ulysses_degree = 4;
  for (const TunedCandidate& one : candidates_of(call)) {
    EXPECT_EQ(one.choice.schedule, "");
    EXPECT_EQ(one.choice.ulysses_degree, 0);
  }
  call.options.implementation = "slow";
  for (const TunedCandidate& one : candidates_of(call)) {
    EXPECT_EQ(one.choice.implementation, "");
  }
}

TEST(TuningCandidates, OfAScheduleThatCannotRunHaveTheReason) {
  PlannedCall call(4);
  call.options.schedule = "hybrid";
  for (const int degree : {3, 8}) {
    call.options.plan.emplace().ulysses_degree = degree;
    const std::vector<TunedCandidate> all = candidates_of(call);
    ASSERT_FALSE(all.empty());
    for (const TunedCandidate& one : all) {
      EXPECT_THAT(one.reason, HasSubstr("does not divide")) << degree;
    }
  }
}

TEST(OpenChoices, AreWhatNobodyHasNamed) {
  PlannedCall call(4);
  const auto open = [&] {
    const PlanInput input = call.input();
    return call.open(input);
  };
  EXPECT_TRUE(open().schedule && open().implementation && open().ulysses_degree);
  EXPECT_TRUE(open().inner_size && open().head_groups);
  EXPECT_FALSE(open().transport) << "between hosts there is one";
  call.options.schedule = "ring";
  EXPECT_TRUE(open().any());
  EXPECT_FALSE(open().schedule || open().ulysses_degree || open().inner_size || open().head_groups);
  call.options.schedule = "hybrid";
  EXPECT_TRUE(open().head_groups);
  EXPECT_FALSE(open().ulysses_degree) << "its default is no guess";
  call.options.schedule = "ring";
  call.options.implementation = "quick";
  EXPECT_FALSE(open().any());
  PlannedCall alone(1, {{"quick", 1}});
  const PlanInput input = alone.input();
  EXPECT_FALSE(alone.open(input).any());
}

TEST(Choice, IsImpossibleWithAReason) {
  PlannedCall call(4);
  const PlanInput input = call.input();
  EXPECT_EQ(obstacle_of({.implementation = "quick", .schedule = "ring"}, input, "auto"), "");
  EXPECT_THAT(obstacle_of({.implementation = "fastest"}, input, "auto"), HasSubstr("fastest"));
  EXPECT_THAT(obstacle_of({.schedule = "local"}, input, "auto"), HasSubstr("is sharded along"));
  EXPECT_THAT(obstacle_of({.schedule = "ring"}, input, "ulysses"), HasSubstr("is not ulysses"));
  EXPECT_THAT(obstacle_of({.schedule = "hybrid", .ulysses_degree = 3}, input, "auto"),
              HasSubstr("does not divide"));
}

// Blocks go to the preferred implementation, however slow it seems.
TEST(Choice, PrefersAnImplementation) {
  PlannedCall call(4);
  const PlanInput input = call.input();
  for (const char* name : {"quick", "slow"}) {
    const RankPlan plan =
        make_rank_plan(with_choice(input, {.implementation = name}), Schedule::ring, 1);
    for (const Block* block : plan.all<Block>()) {
      EXPECT_EQ(plan.implementation_of(*block), name);
    }
  }
}

TEST(Autotune, KeepsTheEarlierOfEquals) {
  const TunedCandidate a{{.schedule = "ring"}, 1, 1.01, ""};
  const TunedCandidate b{{.schedule = "ulysses"}, 1, 1.0, ""};
  const TunedCandidate slow{{.schedule = "hybrid"}, 1, 1.1, ""};
  const TunedCandidate failed{{.schedule = "allgather"}, 1, 0, "no memory"};
  std::vector<TunedCandidate> all{failed, slow, a, b};
  EXPECT_EQ(*fastest(all), a);
  all = {failed, slow, b, a};
  EXPECT_EQ(*fastest(all), b);
  all = {failed};
  EXPECT_EQ(fastest(all), nullptr);
}

}  // namespace
}  // namespace annulus::ring
