#include <gtest/gtest.h>

#include <annulus/ring/transfer_wait.hpp>

namespace annulus::ring {
namespace {

Transfer with(int peer, std::int64_t bytes) {
  Transfer transfer;
  transfer.peer = peer;
  transfer.bytes = bytes;
  return transfer;
}

// Receives and sends in its first two steps, and only sends in the third; nothing in the fourth.
RankPlan plan_of_four_steps() {
  RankPlan plan;
  plan.steps.resize(4);
  plan.steps[0].receives = {with(3, 100)};
  plan.steps[0].sends = {with(1, 200)};
  plan.steps[1].receives = {with(2, 300), with(3, 400)};
  plan.steps[1].sends = {with(1, 500)};
  plan.steps[2].sends = {with(0, 600)};
  return plan;
}

TEST(TransferWait, OneSidedGroupsWaitForOneSideAtATime) {
  const RankPlan plan = plan_of_four_steps();
  EXPECT_EQ(describe_transfers(plan, 0, true), "");
  EXPECT_EQ(describe_transfers(plan, taking_mark(0), true),
            "step 0: waiting for key/value: 100 bytes from rank 3");
  EXPECT_EQ(describe_transfers(plan, taken_mark(0), true),
            "step 0: waiting for key/value: rank 1 to take 200 bytes");
  EXPECT_EQ(describe_transfers(plan, taking_mark(1), true),
            "step 1: waiting for key/value: 300 bytes from rank 2, 400 bytes from rank 3");
  EXPECT_EQ(describe_transfers(plan, taking_mark(2), true), "");
  EXPECT_EQ(describe_transfers(plan, taken_mark(2), true),
            "step 2: waiting for key/value: rank 0 to take 600 bytes");
  EXPECT_EQ(describe_transfers(plan, finished_mark(plan), true), "");
}

TEST(TransferWait, OthersWaitForBothSidesTogether) {
  const RankPlan plan = plan_of_four_steps();
  EXPECT_EQ(describe_transfers(plan, taking_mark(0), false),
            "step 0: waiting for key/value: 100 bytes from rank 3, rank 1 to take 200 bytes");
  EXPECT_EQ(describe_transfers(plan, taken_mark(0), false), "");
  EXPECT_EQ(describe_transfers(plan, taking_mark(2), false),
            "step 2: waiting for key/value: rank 0 to take 600 bytes");
  EXPECT_EQ(describe_transfers(plan, finished_mark(plan), false), "");
}

}  // namespace
}  // namespace annulus::ring
