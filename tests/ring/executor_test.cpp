// Which kernels compute the blocks, and what happens to tensors that do not fit.
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/launcher/verification.hpp>
#include <annulus/ring/sharded_attention.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::ring {
namespace {

using launcher::CaseShards;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// What a kernel says when it is prepared for a block; empty: it can.
using Refuse = std::function<std::string(const AttentionBlock&, const SoftmaxState&)>;

// The native kernel, which refuses some blocks when it is prepared for them, and no others than
// those that it was prepared for.
class Picky final : public Implementation {
 public:
  Picky(std::string name, Refuse refuse) : names_{std::move(name)}, refuse_(std::move(refuse)) {}

  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] Capability capability(const AttentionProblem& /*problem*/,
                                      Place /*place*/) const override {
    return Capability::yes();
  }
  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    return std::make_unique<PickyKernel>(native_.get("native").make_kernel(problem, device),
                                         refuse_);
  }

 private:
  class PickyKernel final : public Kernel {
   public:
    PickyKernel(std::unique_ptr<Kernel> kernel, const Refuse& refuse)
        : kernel_(std::move(kernel)), refuse_(refuse) {}
    void prepare(const AttentionBlock& block, const SoftmaxState& result) override {
      const std::string reason = refuse_(block, result);
      if (!reason.empty()) throw UnsupportedError(reason);
      prepared_.push_back(block.query.strides());
    }
    void forward(const AttentionBlock& block, const SoftmaxState& result,
                 const ExecutionContext& context) override {
      EXPECT_THAT(prepared_, ::testing::Contains(block.query.strides()));
      kernel_->forward(block, result, context);
    }

   private:
    std::unique_ptr<Kernel> kernel_;
    const Refuse& refuse_;
    std::vector<Extents> prepared_;
  };

  std::vector<std::string> names_;
  Registry native_ = Registry::standard();
  Refuse refuse_;
};

std::string nothing(const AttentionBlock& /*block*/, const SoftmaxState& /*result*/) {
  return "";
}
std::string everything(const AttentionBlock& /*block*/, const SoftmaxState& /*result*/) {
  return "no engine";
}
// Blocks above or below the diagonal: those whose columns came from another rank.
std::string foreign(const AttentionBlock& block, const SoftmaxState& /*result*/) {
  return block.rows == block.columns ? "" : "not my columns";
}

template <class Exception, class Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing thrown";
}

class ExecutorTest : public ::testing::Test {
 protected:
  ExecutorTest()
      : mesh_(MeshShape({{"sp", test::session().size()}}), test::session().world(),
              test::kWatchdog) {
    problem_.shape = {1, 48, 48, 4, 2, 16, 8};
    layout_.query = layout_.kv = PartitionSpec::parse("-,sp");
    options_.plan.schedule = "ring";
  }

  [[nodiscard]] bool alone() const { return mesh_.size() == 1; }
  [[nodiscard]] ShardedOperands operands() const {
    return shard_operands(problem_, mesh_.shape(), layout_);
  }
  [[nodiscard]] CaseShards shards() {
    return {operands(), problem_.dtype, 1, mesh_.rank(), device_.memory()};
  }
  [[nodiscard]] ShardedAttention attention() {
    return {problem_, operands(), mesh_, registry_, device_, options_};
  }
  void register_two(Refuse first, Refuse second) {
    registry_ = Registry();
    registry_.add(std::make_unique<Picky>("first", std::move(first)));
    registry_.add(std::make_unique<Picky>("second", std::move(second)));
  }
  [[nodiscard]] CaseShards expected() {
    const Registry standard = Registry::standard();
    CaseShards result = shards();
    ShardedAttention(problem_, operands(), mesh_, standard, device_, options_)
        .run(result.local_tensors());
    return result;
  }
  static void expect_same_bits(const CaseShards& a, const CaseShards& b) {
    EXPECT_EQ(std::memcmp(a.output.view().data(), b.output.view().data(), a.output.bytes()), 0);
    EXPECT_EQ(std::memcmp(a.lse.view().data(), b.lse.view().data(), a.lse.bytes()), 0);
  }

  Mesh mesh_;
  HostDevice device_;
  Registry registry_;
  AttentionProblem problem_;
  OperandLayout layout_;
  ShardedAttentionOptions options_;
};

TEST_F(ExecutorTest, ABlockThatAKernelRefusesGoesToTheNextOne) {
  register_two(foreign, nothing);
  ShardedAttention attention = this->attention();
  EXPECT_EQ(attention.implementations(), alone() ? "first" : "first+second");
  const auto passed_over = attention.selection().passed_over;
  if (alone()) {
    EXPECT_THAT(passed_over, IsEmpty());
  } else {
    ASSERT_THAT(passed_over, SizeIs(1));
    EXPECT_EQ(passed_over[0].first, "first");
    EXPECT_THAT(passed_over[0].second, HasSubstr("not my columns"));
    EXPECT_THAT(passed_over[0].second, HasSubstr(std::to_string(mesh_.size() - 1) + " of " +
                                                 std::to_string(mesh_.size()) + " blocks"));
  }
  const CaseShards mine = shards();
  attention.run(mine.local_tensors());
  expect_same_bits(mine, expected());
}

TEST_F(ExecutorTest, AKernelThatRefusesEveryBlockIsNotNamed) {
  register_two(everything, nothing);
  EXPECT_EQ(attention().implementations(), "second");
}

TEST_F(ExecutorTest, WhatAllKernelsRefuseIsAnErrorWithEveryReason) {
  register_two(everything, [](const auto&, const auto&) { return "no memory"; });
  const std::string message = message_of<UserError>([&] { (void)attention(); });
  EXPECT_THAT(message, HasSubstr("first: no engine"));
  EXPECT_THAT(message, HasSubstr("second: no memory"));
  options_.implementation = "first";
  const std::string named = message_of<UserError>([&] { (void)attention(); });
  EXPECT_THAT(named, HasSubstr("first: no engine"));
  EXPECT_THAT(named, Not(HasSubstr("second")));
}

}  // namespace
}  // namespace annulus::ring
