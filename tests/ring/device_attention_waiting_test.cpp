// Sharded attention on GPU ranks that wait for each other: kernels that await their columns,
// rehearsals without the others, and ranks that stay away.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/ring/device_attention_fixture.hpp"

namespace annulus::ring {
namespace {

using ::testing::HasSubstr;
using verification::ShardedCase;

bool awaits_columns(const ShardedAttention& attention) {
  const std::vector<const Block*> blocks = attention.rank_plan().all<Block>();
  return std::all_of(blocks.begin(), blocks.end(),
                     [](const Block* block) { return !block->arrivals.empty(); });
}

// One kernel computes all columns, most of which arrive long after it has begun.
TEST_F(DeviceAttention, AwaitedColumnsMayComeLate) {
  const int ranks = test::session().size();
  if (ranks < 2) GTEST_SKIP() << "needs 2 ranks";
  if (shared_gpus()) GTEST_SKIP() << "needs a GPU for each rank";
  for (const LayoutKind layout : {LayoutKind::zigzag, LayoutKind::striped}) {
    ShardedCase one = case_of(std::int64_t{384} * ranks + 5, 8, 2, 128);
    one.transport = Transport::peer;
    one.schedule = "allgather";
    one.implementation = "flash_attn2";
    one.layout.sequence = layout;
    expect_verified(one);
    one.problem.shape.heads = 64;  // more tiles than multiprocessors
    one.problem.shape.kv_heads = 8;
    one.plan = PlanOptions::for_place(device().place());
    if (layout == LayoutKind::striped) one.plan->gather_bytes = 1;  // a head at a time
    CaseOnDevice call = on_device(one);
    EXPECT_TRUE(awaits_columns(call.attention));
    std::vector<std::vector<std::byte>> bits;
    for (int late = -1; late < ranks; ++late) {
      // Old columns are now wrong.
      transform(call.shards.value.view(), late < 0 ? 1.0F : -1.0F, 0.0F);
      call.twins.upload();
      mesh_->world().barrier();
      if (mesh_->rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      call.run();
      if (late >= 0 && late % 2 == 0) transform(call.shards.output.view(), -1.0F, 0.0F);
      bits.push_back(call.bits());
      EXPECT_TRUE(bits.back() == bits.front()) << "rank " << late << " is late";
    }
  }
}

// Nothing is sent, and no kernel waits for what does not come. Calls before and after it are the
// same.
TEST_F(DeviceAttention, ARehearsalNeedsNoOtherRank) {
  const int ranks = test::session().size();
  if (ranks < 2) GTEST_SKIP() << "needs 2 ranks";
  for (const Transport transport : transports()) {
    for (const std::string schedule : {"ring", "allgather", "ulysses", "pass_q"}) {
      SCOPED_TRACE(testing::Message() << name_of(transport) << ", " << schedule);
      ShardedCase one = case_of(std::int64_t{384} * ranks + 5, 8, 4, 128);
      one.transport = transport;
      one.schedule = schedule;
      CaseOnDevice call = on_device(one);
      call.twins.upload();
      std::vector<std::vector<std::byte>> bits;
      for (int i = 0; i < 4; ++i) {
        call.attention.rehearse(call.twins.tensors());
        call.run();
        bits.push_back(call.bits());
        EXPECT_TRUE(bits.back() == bits.front()) << "call " << i;
      }
    }
  }
}

// In the first call, in one that is replayed from a recording, and while a kernel awaits columns.
TEST_F(DeviceAttention, ARankThatStaysAwayIsATimeoutOfTheOthers) {
  const int ranks = test::session().size();
  if (ranks < 2) GTEST_SKIP() << "needs 2 ranks";
  const bool stays_away = test::session().rank() + 1 == ranks;
  for (const Transport transport : transports()) {
    for (const int calls_before : {1, 3}) {
      for (const std::string schedule : {"ring", "allgather"}) {
        SCOPED_TRACE(testing::Message()
                     << name_of(transport) << " after " << calls_before << ", " << schedule);
        mesh_->world().barrier();  // what the last time-out left behind is gone
        const Watchdog hasty{Watchdog::Seconds(2)};
        Mesh mesh(mesh_->shape(), test::session().world(), hasty);
        ShardedCase one = case_of(std::int64_t{384} * ranks, 8, 2, 128);
        one.transport = transport;
        one.schedule = schedule;
        if (schedule == "allgather") one.implementation = "flash_attn2";
        CaseOnDevice call(one, options_of(one), mesh, registry_, device());
        EXPECT_EQ(awaits_columns(call.attention),
                  transport == Transport::peer && schedule == "allgather" && !shared_gpus());
        call.twins.upload();
        for (int i = 0; i < calls_before; ++i) call.run();
        mesh_->world().barrier();
        if (!stays_away) {
          const auto begin = std::chrono::steady_clock::now();
          try {
            call.run();
            ADD_FAILURE() << "ended without the last rank";
          } catch (const TimeoutError& error) {
            EXPECT_THAT(error.what(), HasSubstr("waiting for key/value: "));
            // If both sides of a transfer wait for each other, ranks other than the late one can
            // also be waited for.
            if (transport == Transport::peer || mesh.rank() == 0) {
              EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(ranks - 1)));
            }
          }
          EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
        }
        mesh_->world().barrier();
      }
    }
  }
}

}  // namespace
}  // namespace annulus::ring
