#include "runner/transfer_wait.hpp"

#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace annulus::ring {
namespace {

Transfer with(int peer, std::int64_t bytes) {
  Transfer transfer;
  transfer.peer = peer;
  transfer.bytes = bytes;
  return transfer;
}

// Receives and sends in its first two exchanges, and only sends in the third. Its group are the odd
// ranks of the mesh, and another group's exchange stands between.
RankPlan plan_of_three_exchanges() {
  RankPlan plan;
  plan.groups = {{{"sp"}, {1, 3, 5, 7}, 0}, {{"tp"}, {0, 1}, 1}};
  plan.buffers = {
      {BufferKind::exchange, {Content::key, Content::value}, DType::float32, {}, {}, -1}};
  const auto add = [&](int group, int step, std::vector<Transfer> sends,
                       std::vector<Transfer> receives) {
    plan.tasks.push_back({Exchange{group, std::move(sends), std::move(receives), {}}, step, {}});
  };
  add(0, 0, {with(1, 200)}, {with(3, 100)});
  add(1, 1, {with(0, 7)}, {});
  add(0, 1, {with(1, 500)}, {with(2, 300), with(3, 400)});
  add(0, 2, {with(0, 600)}, {});
  return plan;
}

TEST(TransferWait, OneSidedGroupsWaitForOneSideAtATime) {
  const RankPlan plan = plan_of_three_exchanges();
  EXPECT_EQ(describe_transfers(plan, 0, 0, true), "");
  EXPECT_EQ(describe_transfers(plan, 0, taking_mark(0), true),
            "step 0: waiting for key/value: 100 bytes from rank 7");
  EXPECT_EQ(describe_transfers(plan, 0, taken_mark(0), true),
            "step 0: waiting for key/value: rank 3 to take 200 bytes");
  EXPECT_EQ(describe_transfers(plan, 0, taking_mark(1), true),
            "step 1: waiting for key/value: 300 bytes from rank 5, 400 bytes from rank 7");
  EXPECT_EQ(describe_transfers(plan, 0, taking_mark(2), true), "");
  EXPECT_EQ(describe_transfers(plan, 0, taken_mark(2), true),
            "step 2: waiting for key/value: rank 1 to take 600 bytes");
  EXPECT_EQ(describe_transfers(plan, 0, finished_mark(3), true), "");
}

// A rank that has sent a gradient goes on with other contents before the gradient is taken.
TEST(TransferWait, OneSidedGroupsMayWaitForTheLastExchangeOfAnyContents) {
  RankPlan plan = plan_of_three_exchanges();
  plan.buffers.push_back({BufferKind::exchange, {Content::grad_key}, DType::float32, {}, {}, -1});
  for (Transfer& send : std::get<Exchange>(plan.tasks[2].work).sends) send.buffer = 1;
  EXPECT_EQ(describe_transfers(plan, 0, taken_mark(2), true),
            "step 2: waiting for key/value: rank 1 to take 600 bytes, or step 1: waiting for "
            "grad key: rank 3 to take 500 bytes");
  EXPECT_EQ(describe_transfers(plan, 0, taking_mark(2), true), "");
}

TEST(TransferWait, OthersWaitForBothSidesTogether) {
  const RankPlan plan = plan_of_three_exchanges();
  EXPECT_EQ(describe_transfers(plan, 0, taking_mark(0), false),
            "step 0: waiting for key/value: 100 bytes from rank 7, rank 3 to take 200 bytes");
  EXPECT_EQ(describe_transfers(plan, 0, taken_mark(0), false), "");
  EXPECT_EQ(describe_transfers(plan, 0, taking_mark(2), false),
            "step 2: waiting for key/value: rank 1 to take 600 bytes");
  EXPECT_EQ(describe_transfers(plan, 0, finished_mark(3), false), "");
}

TEST(TransferWait, GroupsAreToldApart) {
  EXPECT_EQ(describe_transfers(plan_of_three_exchanges(), 1, taking_mark(0), false),
            "step 1: waiting for key/value: rank 0 to take 7 bytes");
}

}  // namespace
}  // namespace annulus::ring
