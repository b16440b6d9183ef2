// Choices, policies, and the cache in memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/ring/tuning/entries.hpp"
#include "tests/ring/tuning/planned_call.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

using ::testing::HasSubstr;

TEST(Choice, SaysWhatItChooses) {
  EXPECT_EQ(choice_text(Choice()), "nothing");
  EXPECT_EQ(choice_text(Choice{.implementation = "sdpa",
                               .schedule = "hybrid",
                               .transport = Transport::peer,
                               .ulysses_degree = 2}),
            "schedule hybrid, ulysses degree 2, implementation sdpa, transport peer");
  EXPECT_TRUE(Choice().is_open());
  EXPECT_FALSE(Choice{.inner_size = 2}.is_open());
}

TEST(Choice, TheInnerOneCountsMemberByMember) {
  const Choice outer{.implementation = "a", .schedule = "ring", .inner_size = 2};
  const Choice inner{.schedule = "ulysses", .ulysses_degree = 3};
  EXPECT_EQ(
      nested(outer, inner),
      (Choice{.implementation = "a", .schedule = "ulysses", .ulysses_degree = 3, .inner_size = 2}));
  EXPECT_EQ(nested(outer, {}), outer);
}

// Whatever the default is: what the caller names is his, also if he names just that.
TEST(Choice, HeadGroupsThatAreNamedAreNotOpen) {
  PlannedCall call(4);
  call.options.schedule = "ulysses";
  EXPECT_TRUE(call.open(call.input()).head_groups);
  call.options.plan.emplace().head_group_bytes = kDefaultHeadGroupBytes;
  EXPECT_FALSE(call.open(call.input()).head_groups);
  call.options.overlay.head_group_bytes = 1;
  EXPECT_EQ(under_overlay(call.options, Place::host()).plan->head_group_bytes,
            kDefaultHeadGroupBytes);
}

TEST(Overlay, SetsWhatIsLeftOpenAndSaysWhatThatIs) {
  ShardedAttentionOptions options;
  options.schedule = "ring";
  options.plan.emplace().ulysses_degree = 2;
  options.overlay = {.implementation = "native",
                     .schedule = "ulysses",
                     .transport = Transport::peer,
                     .ulysses_degree = 4,
                     .inner_size = 2,
                     .head_group_bytes = 1024};
  const ShardedAttentionOptions on_host = under_overlay(options, Place::host());
  EXPECT_EQ(on_host.implementation, "native");
  EXPECT_EQ(on_host.schedule, "ring");
  EXPECT_EQ(on_host.transport, Transport::automatic);
  EXPECT_EQ(on_host.plan->ulysses_degree, 2);
  EXPECT_EQ(on_host.plan->inner_size, 2);
  EXPECT_EQ(on_host.plan->head_group_bytes, 1024);
  EXPECT_EQ(on_host.overlay,
            (Choice{.implementation = "native", .inner_size = 2, .head_group_bytes = 1024}));
  const ShardedAttentionOptions on_gpu = under_overlay(options, Place::cuda(0));
  EXPECT_EQ(on_gpu.transport, Transport::peer);
  EXPECT_EQ(on_gpu.overlay.transport, Transport::peer);
  options.implementation = "sdpa";
  options.plan->inner_size = options.plan->ulysses_degree = 3;
  options.plan->head_group_bytes = 1;
  EXPECT_TRUE(under_overlay(options, Place::host()).overlay.is_open());
}

TEST(TuningPolicy, HasNames) {
  for (const TuningPolicy policy :
       {TuningPolicy::off, TuningPolicy::cached, TuningPolicy::measure}) {
    EXPECT_EQ(parse_tuning_policy(name_of(policy)), policy);
  }
  const std::string message =
      test::message_of<ArgumentError>([] { (void)parse_tuning_policy("on"); });
  EXPECT_THAT(message, HasSubstr("off, cached, measure"));
}

TEST(TuningCache, KeepsTheLatestOfAKey) {
  TuningCache cache;
  TuningEntry entry = example_entry();
  EXPECT_FALSE(cache.find(entry.key));
  cache.keep(entry);
  cache.keep(example_entry("B=2"));
  entry.choice.schedule = "ring";
  cache.keep(entry);
  EXPECT_EQ(cache.find(entry.key), entry);
  EXPECT_EQ(cache.find(example_entry("B=2").key), example_entry("B=2"));
  cache.clear();
  EXPECT_FALSE(cache.find(entry.key));
}

}  // namespace
}  // namespace annulus::ring
