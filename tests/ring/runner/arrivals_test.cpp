#include "runner/arrivals.hpp"

#include <cstdint>
#include <variant>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>
#include <annulus/ring/planner.hpp>

#include "tests/ring/runner/no_operations.hpp"
#include "tests/ring/sequence_plan.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::ring {
namespace {

// Publishes to host memory at once.
class Publishing final : public NoOperations {
 public:
  void publish(std::int32_t value, std::int32_t* number, Stream& /*stream*/) const override {
    *number = value;
  }
};

// In every call a block first sees its own columns, then more after each exchange, then all.
TEST(Arrivals, FollowTheExchanges) {
  const AttentionProblem problem = causal_problem(1024, 8, 2);
  PlanOptions options = PlanOptions::for_place(Place::cuda(0));
  options.gather_bytes = 1;  // a block for each key/value head
  for (const int ranks : {2, 4}) {
    const ShardedOperands operands = sequence_operands(problem, ranks, LayoutKind::zigzag);
    const RankPlan plan =
        make_rank_plan(flash_input(problem, operands, options), Schedule::allgather, ranks - 1);
    HostMemoryPool memory;
    const Arrivals arrivals(plan, memory);
    ASSERT_TRUE(arrivals.any());
    const Publishing operations;
    HostStream stream("compute", test::kWatchdog, nullptr);
    for (int call = 0; call < 2; ++call) {
      arrivals.begin(operations, stream);
      int blocks = 0;
      for (std::size_t t = 0; t < plan.tasks.size(); ++t) {
        const auto* block = std::get_if<Block>(&plan.tasks[t].work);
        EXPECT_EQ(arrivals.number_of(t) != nullptr, block != nullptr);
        if (block == nullptr) continue;
        ++blocks;
        EXPECT_EQ(*arrivals.number_of(t),
                  block->arrivals.front().columns.end() - block->columns.begin);
        for (const Arrival& arrival : block->arrivals) {
          arrivals.announce(static_cast<std::size_t>(arrival.task), operations, stream);
          EXPECT_EQ(*arrivals.number_of(t), arrival.columns.begin - block->columns.begin);
        }
        EXPECT_EQ(*arrivals.number_of(t), 0);
      }
      EXPECT_EQ(blocks, 2);
    }
  }
}

TEST(Arrivals, OfAPlanWithoutThemTakeNothing) {
  const AttentionProblem problem = causal_problem(1024, 8, 2);
  const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::zigzag);
  const RankPlan plan = make_rank_plan(flash_input(problem, operands), Schedule::ring, 0);
  HostMemoryPool memory;
  const Arrivals arrivals(plan, memory);
  EXPECT_FALSE(arrivals.any());
  for (std::size_t t = 0; t < plan.tasks.size(); ++t) EXPECT_EQ(arrivals.number_of(t), nullptr);
}

}  // namespace
}  // namespace annulus::ring
