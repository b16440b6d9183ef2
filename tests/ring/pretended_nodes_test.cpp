// Attention on ranks that pretend, by ANNULUS_NODE, to be on several nodes.
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ring/sharded_attention_fixture.hpp"
#include "tests/support/environment_variable.hpp"

namespace annulus::ring {
namespace {

using ::testing::Each;
using verification::CaseShards;

// Two ranks on each node; before the mesh is made.
struct NodesOfTwo {
  test::EnvironmentVariable node{"ANNULUS_NODE",
                                 "node" + std::to_string(test::session().rank() / 2)};
};

class PretendedNodes : private NodesOfTwo, public ShardedAttentionFixture {
 protected:
  PretendedNodes() {
    problem_.shape = {1, 96, 96, 8, 8, 16, 16};
    options_.plan.emplace();
  }

  // The bytes that all ranks receive from other nodes. Collective.
  [[nodiscard]] std::int64_t bytes_across(const ShardedAttention& attention) {
    std::int64_t mine = 0;
    for (const Exchange* exchange : attention.rank_plan().all<Exchange>()) {
      for (const Transfer& transfer : exchange->receives) {
        if (transfer.peer / 2 != mesh_.rank() / 2) mine += transfer.bytes;
      }
    }
    std::int64_t all = 0;
    for (const std::string& one : mesh_.world().gather_text(std::to_string(mine))) {
      all += std::stoll(one);
    }
    return all;
  }

  const int nodes_ = (mesh_.size() + 1) / 2;
};

// Keys and values enter each other node once, even if owners are to send them directly; the keys
// and values of a node's second rank come back to its first.
TEST_F(PretendedNodes, GetEachShardOnce) {
  const std::int64_t all = 96 * 8 * (16 + 16) * 4;
  std::vector<CaseShards> results;
  for (const bool direct : {false, true}) {
    options_.plan->direct = direct;
    ShardedAttention attention = this->attention();
    EXPECT_EQ(bytes_across(attention), nodes_ == 1 ? 0 : (nodes_ - 1) * all + all / 2)
        << (direct ? "direct" : "passed on");
    results.push_back(computed(attention));
  }
  expect_same_bits(results[0], results[1]);
}

// Likewise where each rank gets all keys and values at once. The results have the same bits as on
// one node.
TEST_F(PretendedNodes, GatherEachShardOnce) {
  const std::int64_t all = 96 * 8 * (16 + 16) * 4;
  options_.schedule = "allgather";
  for (const std::int64_t gather_bytes : {1, 1 << 20}) {
    options_.plan->gather_bytes = gather_bytes;
    ShardedAttention attention = this->attention();
    EXPECT_EQ(bytes_across(attention), (nodes_ - 1) * all);
    const CaseShards apart = computed(attention);
    const test::EnvironmentVariable one("ANNULUS_NODE", "one");
    Mesh together(mesh_.shape(), test::session().world(), test::kWatchdog);
    ShardedAttention alone(problem_, operands(), together, registry_, device_, options_);
    EXPECT_TRUE(alone.plan_input().prices.node_of_rank.empty());
    expect_same_bits(apart, computed(alone));
  }
}

// Rank 0 chooses for all.
TEST_F(PretendedNodes, HaveTheSameVariantOnAllRanks) {
  for (const char* schedule : {"auto", "hybrid", "double_ring"}) {
    options_.schedule = schedule;
    ShardedAttention attention = this->attention();
    const ScheduleChoice& choice = attention.schedule();
    const std::string mine = fmt::format("{}, planned with {} and {}", variant_text(choice),
                                         attention.plan_input().options.ulysses_degree,
                                         attention.plan_input().options.inner_size);
    EXPECT_THAT(mesh_.world().gather_text(mine), Each(mine));
    if (schedule == std::string("hybrid")) {
      EXPECT_EQ(choice.ulysses_degree, mesh_.size()) << "with 8 key/value heads";
    }
    if (schedule == std::string("double_ring") && mesh_.size() > 1) {
      EXPECT_EQ(choice.inner_size, 2);
    }
    const CaseShards alone = computed(attention);
    EXPECT_GT(alone.output.bytes(), 0U);
  }
}

}  // namespace
}  // namespace annulus::ring
