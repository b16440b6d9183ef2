#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::ring {

/// Tensors of shards, head-major in memory: [b,n,t,D], given through strides.
struct HeadMajor {
  HeadMajor(const verification::CaseShards& shards, MemoryPool& memory) : lse(shards.lse.view()) {
    for (const Tensor* tensor : {&shards.query, &shards.key, &shards.value, &shards.output}) {
      const Extents& s = tensor->shape();
      tensors.emplace_back(tensor->dtype(), Extents{s[0], s[2], s[1], s[3]}, memory);
      copy(tensor->view(), bthd(tensors.back()));
    }
  }
  static TensorView bthd(const Tensor& tensor) { return tensor.view().permute({0, 2, 1, 3}); }
  [[nodiscard]] LocalTensors local_tensors() const {
    return {bthd(tensors[0]), bthd(tensors[1]), bthd(tensors[2]), bthd(tensors[3]), lse};
  }

  std::vector<Tensor> tensors;
  TensorView lse;
};

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
