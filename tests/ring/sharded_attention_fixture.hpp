#pragma once

#include <cstdint>
#include <cstring>

#include <gtest/gtest.h>

#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::ring {

/// ShardedAttention on the CPUs of all ranks, along one sequence axis.
class ShardedAttentionFixture : public ::testing::Test {
 protected:
  ShardedAttentionFixture() {
    layout_.query = layout_.kv = PartitionSpec::parse("-,sp");
    options_.schedule = "ring";
  }

  [[nodiscard]] bool alone() const { return mesh_.size() == 1; }
  [[nodiscard]] ShardedOperands operands() const {
    return shard_operands(problem_, mesh_.shape(), layout_);
  }
  [[nodiscard]] verification::CaseShards shards(std::uint64_t seed = 1) {
    return {operands(), problem_.dtype,           seed, mesh_.rank(), device_.memory(), 1,
            {},         problem_.normalize_output};
  }
  [[nodiscard]] ShardedAttention attention() {
    return {problem_, operands(), mesh_, registry_, device_, options_};
  }
  /// The shards with the results of `attention`.
  [[nodiscard]] verification::CaseShards computed(ShardedAttention& attention,
                                                  std::uint64_t seed = 1) {
    verification::CaseShards result = shards(seed);
    attention.run(result.local_tensors());
    return result;
  }
  [[nodiscard]] verification::CaseShards computed(std::uint64_t seed = 1) {
    ShardedAttention attention = this->attention();
    return computed(attention, seed);
  }
  [[nodiscard]] static bool same_bits(const Tensor& a, const Tensor& b) {
    return a.bytes() == b.bytes() && std::memcmp(a.view().data(), b.view().data(), a.bytes()) == 0;
  }
  static void expect_same_bits(const verification::CaseShards& a,
                               const verification::CaseShards& b) {
    ASSERT_GT(a.output.bytes(), 0U);
    EXPECT_TRUE(same_bits(a.output, b.output));
    EXPECT_TRUE(same_bits(a.lse, b.lse));
  }

  Mesh mesh_{MeshShape({{"sp", test::session().size()}}), test::session().world(), test::kWatchdog};
  HostDevice device_;
  Registry registry_ = Registry::standard();
  AttentionProblem problem_;
  OperandLayout layout_;
  ShardedAttentionOptions options_;
};

}  // namespace annulus::ring
