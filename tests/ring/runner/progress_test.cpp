#include "runner/progress.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runner/transfer_wait.hpp"
#include "tests/support/idle_stream.hpp"

namespace annulus::ring {
namespace {

/// A stream of a device that has come as far as the test says.
class StreamAt final : public test::IdleStream {
 public:
  StreamAt() : IdleStream(Place::cuda(0)) {}
  void mark(std::uint32_t value) override { mark_ = value; }
  [[nodiscard]] std::uint32_t marked() const override { return mark_; }

 private:
  std::uint32_t mark_ = 0;
};

// An exchange, a block, and an exchange of what the block has computed.
template <class Work>
RankPlan plan_around(Work block, std::int64_t pairs) {
  RankPlan plan;
  plan.local = {1, 8, 8, 1, 1, 64, 64};
  plan.groups = {{{"sp"}, {0, 1}, 0}};
  plan.buffers = {{BufferKind::exchange, {Content::key}, DType::float32, {}, {}, -1}};
  Transfer transfer;
  transfer.bytes = 8;
  block.pairs = pairs;
  block.heads = {0, 1};
  plan.tasks.push_back({Exchange{0, {}, {transfer}, {}}, 0, {}});
  plan.tasks.push_back({std::move(block), 0, {}});
  plan.tasks.push_back({Exchange{0, {transfer}, {}, {}}, 1, {{1, Stage::done}}});
  return plan;
}

// Both passes: a rank that computes for long is no rank that waits for others.
template <class Work>
void expect_that_long_blocks_count(Work block) {
  for (const bool is_long : {false, true}) {
    const RankPlan plan = plan_around(block, is_long ? std::int64_t{1} << 40 : 64);
    StreamAt computing;
    const auto exchanging = std::make_shared<StreamAt>();
    const std::unique_ptr<Group> group = make_self_group();
    std::vector<ExchangeQueue> queues;
    queues.emplace_back(plan, 0, *group, exchanging);
    const Progress progress(plan, Place::cuda(0), computing, queues);
    progress.begin();
    exchanging->mark(taking_mark(0));
    EXPECT_FALSE(progress.awaits_only_itself()) << "the first exchange waits for its peer";
    exchanging->mark(taken_mark(0));
    EXPECT_EQ(progress.awaits_only_itself(), is_long);
    const std::uint64_t before = progress.moved();
    progress.mark(1);
    EXPECT_EQ(progress.moved() != before, is_long);
    EXPECT_FALSE(progress.awaits_only_itself()) << "the block has ended";
    EXPECT_TRUE(progress.is_under_way());
    queues.front().mark_end();
    EXPECT_FALSE(progress.is_under_way());
    EXPECT_TRUE(progress.awaits_only_itself());
    EXPECT_EQ(progress.describe(), "waiting for cuda:0 to compute");
  }
}

TEST(Progress, LongBlocksOfTheForwardPassCount) {
  expect_that_long_blocks_count(Block());
}
TEST(Progress, LongBlocksOfTheBackwardPassCount) {
  expect_that_long_blocks_count(BackwardBlock());
}

}  // namespace
}  // namespace annulus::ring
