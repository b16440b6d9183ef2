#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/ring/recommend.hpp>

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

TEST(PlanAttention, RefusesNodesThatDoNotDivideTheRanks) {
  const MeshShape mesh({{"sp", 4}});
  EXPECT_THROW((void)plan_attention(causal_options(), mesh, Place::host(), 3), ArgumentError);
}

}  // namespace
}  // namespace annulus::ring
