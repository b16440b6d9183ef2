#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/ring/layout_choice.hpp>
#include <annulus/ring/recommend.hpp>

#include "recommend/planned_problem.hpp"

namespace annulus::ring {
namespace {

using ::testing::SizeIs;

AttentionOptions causal_options() {
  AttentionOptions options;
  options.shape = {2, 4096, 4096, 8, 2, 64, 64};
  options.mask.set_causal(true);
  return options;
}

// Both predict by the same simulation, so they must agree to the last bit.
TEST(PlanAttention, PredictsWhatIsRecommended) {
  const AttentionOptions options = causal_options();
  const std::vector<Recommendation> found = recommend(options, {.ranks = 4, .nodes = 2});
  int compared = 0;
  for (const Recommendation& one : found) {
    if (!one.variant || one.run.seconds == 0) continue;  // not simulated to its end
    AttentionOptions named = options;
    named.layout = one.layout;
    named.schedule = name_of(one.variant->schedule);
    named.ulysses_degree = one.variant->ulysses_degree;
    named.inner_size = one.variant->inner_size;
    const PlannedAttention planned =
        plan_attention(named, MeshShape::parse(one.mesh, 0), Place::host(), 2);
    EXPECT_EQ(planned.run.seconds, one.run.seconds) << one.mesh;
    EXPECT_EQ(planned.run.memory_bytes, one.run.memory_bytes) << one.mesh;
    EXPECT_EQ(planned.transport, one.transport) << one.mesh;
    EXPECT_THAT(planned.plan.ranks, SizeIs(4));
    ++compared;
  }
  EXPECT_GT(compared, 4);
}

TEST(PlanAttention, ChoosesTheFastestSchedule) {
  AttentionOptions options = causal_options();
  const MeshShape mesh({{"sp", 4}});
  const PlannedAttention chosen = plan_attention(options, mesh, Place::host());
  for (const char* schedule : {"ring", "allgather", "ulysses"}) {
    options.schedule = schedule;
    EXPECT_LE(chosen.run.seconds, 1.01 * plan_attention(options, mesh, Place::host()).run.seconds)
        << schedule;
  }
}

TEST(PlanAttention, TakesTheTransportThatIsAsked) {
  AttentionOptions options = causal_options();
  options.dtype = DType::bfloat16;
  const MeshShape mesh({{"sp", 16}});
  for (const Transport transport : {Transport::nccl, Transport::composite}) {
    options.transport = transport;
    EXPECT_EQ(plan_attention(options, mesh, Place::cuda(0), 2).transport, name_of(transport));
    for (const Recommendation& one :
         recommend(options, {.ranks = 16, .nodes = 2, .place = Place::cuda(0)})) {
      if (one.run.seconds > 0) {
        EXPECT_EQ(one.transport, name_of(transport)) << one.mesh;
      }
    }
  }
}

// An implementation may be a schedule, and the caller's plan options count.
TEST(Recommend, PlansTheOptionsThatAreGiven) {
  AttentionOptions options = causal_options();
  options.implementation = "ring";
  options.plan = PlanOptions::for_place(Place::host());
  options.plan->head_group_bytes = 1;
  int ring = 0;
  for (const Recommendation& one : recommend(options, {.ranks = 4})) {
    if (!one.variant || one.run.seconds == 0) continue;
    EXPECT_EQ(one.variant->schedule, Schedule::ring) << one.mesh;
    AttentionOptions named = options;
    named.layout = one.layout;
    EXPECT_EQ(plan_attention(named, MeshShape::parse(one.mesh, 0), Place::host()).run.seconds,
              one.run.seconds);
    ++ring;
  }
  EXPECT_GT(ring, 1);
}

TEST(Recommend, CountsTheBiasPolicy) {
  AttentionOptions options = causal_options();
  options.bias = {2, 8, 4096, 4096};
  options.bias_policy = BiasPolicy::bias_wins;  // no mask is left
  const std::vector<Recommendation> found = recommend(options, {.ranks = 4});
  AttentionOptions named = options;
  named.layout = found.front().layout;
  EXPECT_EQ(
      plan_attention(named, MeshShape::parse(found.front().mesh, 0), Place::host()).run.seconds,
      found.front().run.seconds);
}

// A training step: the sum of both passes decides, each with its own schedule.
TEST(Recommend, AnswersForBothPasses) {
  const AttentionOptions options = causal_options();
  const WantedRanks wanted{.ranks = 4, .nodes = 2, .backward = true};
  const std::vector<Recommendation> found = recommend(options, wanted);
  const Recommendation& best = found.front();
  ASSERT_TRUE(best.why_not.empty());
  int compared = 0;
  for (const Recommendation& one : found) {
    if (!one.backward || one.run.seconds == 0) continue;
    EXPECT_LE(best.total(), one.total() * kTie) << one.mesh;
    const Registry registry = Registry::standard();
    const PlannedProblem backward(options, registry, Place::host(), Presence::assumed, {0, 0, 1, 1},
                                  BackwardRequest{});
    LayoutOptions asked = options;
    asked.layout = one.layout;
    const LaidOut laid_out = backward.lay_out(MeshShape::parse(one.mesh, 0), asked);
    const PlanInput input = backward.input(laid_out);
    const double fastest = choose_schedule(input, "auto").seconds;
    if (fastest > 0) {
      EXPECT_NEAR(one.backward_run.seconds, fastest, 0.011 * fastest) << one.mesh;
    }
    EXPECT_GE(one.run.memory_bytes, one.backward_run.memory_bytes);
    EXPECT_GT(one.backward_run.seconds, one.run.seconds) << one.mesh;
    ++compared;
  }
  EXPECT_GT(compared, 2);
}

// A sample of such a mesh rules candidates out, and all of its ranks are simulated for the others.
TEST(Recommend, AnswersForHundredsOfRanks) {
  AttentionOptions options = causal_options();
  options.shape = {1, 288 * 256, 288 * 256, 8, 2, 64, 64};
  options.schedule = "ring";
  WantedRanks wanted{.ranks = 288, .nodes = 36, .mesh = MeshShape({{"sp", 288}}), .backward = true};
  const std::vector<Recommendation> all = recommend(options, wanted);
  ASSERT_EQ(all.front().why_not, "");
  EXPECT_GT(all.front().backward_run.seconds, all.front().run.seconds);
  options.layout = all.front().layout;
  EXPECT_EQ(plan_attention(options, *wanted.mesh, Place::host(), 36).run.seconds,
            all.front().run.seconds);
  wanted.memory_bytes = all.front().run.memory_bytes - 1;
  for (const Recommendation& one : recommend(options, wanted)) {
    EXPECT_NE(one.why_not, "") << one.run.memory_bytes;
  }
}

TEST(Recommend, RefusesWrongNamesAndProblems) {
  AttentionOptions options = causal_options();
  options.implementation = "natvie";
  EXPECT_THROW((void)recommend(options, {.ranks = 4}), ArgumentError);
  options.implementation.clear();
  options.schedule = "rnig";
  EXPECT_THROW((void)recommend(options, {.ranks = 4}), ArgumentError);
  options.schedule.clear();
  options.shape.kv_heads = 5;
  EXPECT_THROW((void)recommend(options, {.ranks = 4}), UserError);
}

TEST(PlanAttention, RefusesNodesThatDoNotDivideTheRanks) {
  const MeshShape mesh({{"sp", 4}});
  EXPECT_THROW((void)plan_attention(causal_options(), mesh, Place::host(), 3), ArgumentError);
}

}  // namespace
}  // namespace annulus::ring
