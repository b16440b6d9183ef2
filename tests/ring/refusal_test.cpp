// Which kernels compute the blocks, and what happens to tensors that do not fit.
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/ring/sharded_attention_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using verification::CaseShards;

// The refusal of a kernel that is prepared for a block; empty: it takes the block.
using Refuse = std::function<std::string(const AttentionBlock&, const SoftmaxState&)>;

// Refuses some blocks when it is prepared for them, and computes only blocks that it was prepared
// for.
class PickyKernel final : public Kernel {
 public:
  PickyKernel(std::unique_ptr<Kernel> kernel, Refuse refuse)
      : kernel_(std::move(kernel)), refuse_(std::move(refuse)) {}
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
  Refuse refuse_;
  std::vector<Extents> prepared_;
};

void add_picky(Registry& registry, std::string name, const Refuse& refuse) {
  test::add_native(registry, std::move(name), 1, [refuse](std::unique_ptr<Kernel> native) {
    return std::make_unique<PickyKernel>(std::move(native), refuse);
  });
}

std::string nothing(const AttentionBlock& /*block*/, const SoftmaxState& /*result*/) {
  return "";
}
std::string everything(const AttentionBlock& /*block*/, const SoftmaxState& /*result*/) {
  return "no engine";
}
// Blocks above or below the diagonal: their columns came from another rank.
std::string foreign(const AttentionBlock& block, const SoftmaxState& /*result*/) {
  return block.rows == block.columns ? "" : "not my columns";
}

class RefusalTest : public ShardedAttentionFixture {
 protected:
  RefusalTest() { problem_.shape = {1, 48, 48, 4, 2, 16, 8}; }

  void register_two(const Refuse& first, const Refuse& second) {
    registry_ = Registry();
    add_picky(registry_, "first", first);
    add_picky(registry_, "second", second);
  }
  [[nodiscard]] CaseShards expected() {
    const Registry standard = Registry::standard();
    CaseShards result = shards();
    ShardedAttention(problem_, operands(), mesh_, standard, device_, options_)
        .run(result.local_tensors());
    return result;
  }
};

TEST_F(RefusalTest, ABlockThatAKernelRefusesGoesToTheNextOne) {
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
  expect_same_bits(computed(attention), expected());
}

// Kernels are built, and plans made, for longer than the others would wait for a silent rank.
TEST_F(RefusalTest, MakingReadyIsNoSilence) {
  if (alone()) GTEST_SKIP() << "needs 2 ranks";
  Mesh hasty(mesh_.shape(), test::session().world(), Watchdog(Watchdog::Seconds(1)));
  const bool slow = mesh_.rank() == 0;
  const Refuse take_long = [slow](const AttentionBlock& /*block*/, const SoftmaxState& /*result*/) {
    if (slow) std::this_thread::sleep_for(std::chrono::seconds(2));
    return std::string();
  };
  register_two(take_long, nothing);
  EXPECT_NO_THROW(ShardedAttention(problem_, operands(), hasty, registry_, device_, options_));
}

TEST_F(RefusalTest, AKernelThatRefusesEveryBlockIsNotNamed) {
  register_two(everything, nothing);
  EXPECT_EQ(attention().implementations(), "second");
}

TEST_F(RefusalTest, WhatAllKernelsRefuseIsAnErrorWithEveryReason) {
  register_two(everything, [](const auto&, const auto&) { return "no memory"; });
  const std::string message = test::message_of<UserError>([&] { (void)attention(); });
  EXPECT_THAT(message, HasSubstr("first: no engine"));
  EXPECT_THAT(message, HasSubstr("second: no memory"));
  options_.implementation = "first";
  const std::string named = test::message_of<UserError>([&] { (void)attention(); });
  EXPECT_THAT(named, HasSubstr("first: no engine"));
  EXPECT_THAT(named, Not(HasSubstr("second")));
}

// Strides that an unsharded call with [b,t,n,D] in memory would not have.
std::string head_major(const AttentionBlock& block, const SoftmaxState& /*result*/) {
  return block.query.stride(1) < block.query.stride(2) ? "head-major" : "";
}

TEST_F(RefusalTest, TensorsThatLieOtherwiseArePlannedForAnew) {
  register_two(head_major, nothing);
  ShardedAttention attention = this->attention();
  const CaseShards mine = shards();
  const HeadMajor other(mine, device_.memory());
  const CaseShards right = expected();
  for (int i = 0; i < 2; ++i) {
    attention.prepare(mine.local_tensors());
    attention.run(mine.local_tensors());
    EXPECT_EQ(attention.implementations(), "first");
    expect_same_bits(mine, right);
    attention.prepare(other.local_tensors());
    attention.run(other.local_tensors());
    EXPECT_EQ(attention.implementations(), "second");
    copy(HeadMajor::bthd(other.tensors[3]), mine.output.view());
    expect_same_bits(mine, right);
  }
}

// Ranks agree on the tensors of the first call by themselves.
TEST_F(RefusalTest, ARefusalOfOneRankIsPlannedForByAll) {
  const int culprit = mesh_.size() - 1;
  register_two(head_major, nothing);
  ShardedAttention attention = this->attention();
  const CaseShards mine = shards();
  const HeadMajor other(mine, device_.memory());
  const bool odd = mesh_.rank() == culprit;
  attention.run(odd ? other.local_tensors() : mine.local_tensors());
  if (odd) copy(HeadMajor::bthd(other.tensors[3]), mine.output.view());
  expect_same_bits(mine, expected());
  if (odd) {
    EXPECT_EQ(attention.implementations(), "second");
  }
}

TEST_F(RefusalTest, StridesThatNobodyPreparedForAndAKernelRefusesAreAFailure) {
  register_two(head_major, nothing);
  ShardedAttention attention = this->attention();
  const CaseShards mine = shards();
  const HeadMajor other(mine, device_.memory());
  attention.run(mine.local_tensors());
  const std::string message =
      test::message_of<LibraryError>([&] { attention.run(other.local_tensors()); });
  EXPECT_THAT(message, HasSubstr("were not prepared for: first: head-major"));
}

TEST_F(RefusalTest, AllRanksHearOfTensorsThatDoNotFitOne) {
  register_two(nothing, nothing);
  const int culprit = mesh_.size() - 1;
  const CaseShards mine = shards();
  const LocalTensors good = mine.local_tensors();
  const Tensor half(DType::float16, mine.key.shape(), device_.memory());
  const auto with = [&](const std::function<void(LocalTensors&)>& change) {
    LocalTensors bad = good;
    if (mesh_.rank() == culprit) change(bad);
    return bad;
  };
  const std::vector<std::pair<LocalTensors, std::vector<std::string>>> cases{
      {with([&](LocalTensors& t) { t.query = good.query.slice(2, 0, 3); }),
       {"query: got shape", to_string(good.query.shape())}},
      {with([&](LocalTensors& t) { t.key = good.key.slice(3, 0, 15); }), {"key: got shape"}},
      {with([&](LocalTensors& t) { t.key = half.view(); }), {"key: got float16, expected float32"}},
      {with([&](LocalTensors& t) {
         t.value = {good.value.data(), DType::float32, good.value.shape(), {1, 2, 2, 2}};
       }),
       {"value: got strides [1, 2, 2, 2]", "last dimension"}},
      {with([&](LocalTensors& t) {
         t.output = {good.output.data(), DType::float32, good.output.shape(), Place::cuda(0)};
       }),
       {"output: got memory of cuda:0, expected cpu"}},
      {with([&](LocalTensors& t) {
         t.output = {good.output.data(), DType::float32, good.output.shape(), {1024, 32, 0, 1}};
       }),
       {"output: got strides [1024, 32, 0, 1]", "memory of its own"}},
      {with([&](LocalTensors& t) {
         t.lse = {nullptr, DType::float32, good.lse.shape()};
       }),
       {"LSE: got a null pointer"}}};
  ShardedAttention attention = this->attention();
  for (const auto& one : cases) {
    const std::string message = test::message_of<UserError>([&] { attention.run(one.first); });
    for (const std::string& text : one.second) EXPECT_THAT(message, HasSubstr(text));
    if (!alone()) {
      EXPECT_THAT(message, HasSubstr("rank " + std::to_string(culprit) + ": "));
    }
  }
  attention.run(good);
  expect_same_bits(mine, expected());
  // Ranks can agree again on what they have agreed on once.
  for (const auto& [tensors, texts] : cases) {
    EXPECT_THROW(attention.prepare(tensors), UserError);
    attention.run(good);
  }
  expect_same_bits(mine, expected());
}

// No rank waits for one whose first tensors no kernel can take.
TEST_F(RefusalTest, AllRanksHearOfStridesThatNoKernelTakes) {
  register_two(head_major, head_major);
  const CaseShards mine = shards();
  const HeadMajor other(mine, device_.memory());
  ShardedAttention attention = this->attention();
  const bool culprit = mesh_.rank() == 0;
  const std::string message = test::message_of<UserError>(
      [&] { attention.run(culprit ? other.local_tensors() : mine.local_tensors()); });
  EXPECT_THAT(message, HasSubstr("first: head-major; second: head-major"));
  attention.run(mine.local_tensors());
  expect_same_bits(mine, expected());
}

// No memory on one rank, say: all hear of it, and go on with what they had.
TEST_F(RefusalTest, AFailureToMakeReadyLeavesTheObjectAsGoodAsBefore) {
  const bool culprit = mesh_.rank() == mesh_.size() - 1;
  for (const bool replanned : {false, true}) {
    const auto fails = [culprit](const AttentionBlock& block, const SoftmaxState& result) {
      if (culprit && !head_major(block, result).empty()) throw LibraryError("out of memory");
      return std::string();
    };
    if (replanned) {
      register_two(head_major, fails);
    } else {
      register_two(fails, fails);
    }
    const CaseShards mine = shards();
    const HeadMajor other(mine, device_.memory());
    ShardedAttention attention = this->attention();
    for (int i = 0; i < 2; ++i) {
      attention.run(mine.local_tensors());
      expect_same_bits(mine, expected());
      EXPECT_THROW(attention.prepare(other.local_tensors()), AgreedFailure);
    }
    attention.run(mine.local_tensors());
    expect_same_bits(mine, expected());
  }
}

TEST_F(RefusalTest, AnObjectThatCannotBeMadeReadyAgainSaysSo) {
  auto fails = std::make_shared<bool>(false);
  const auto once = [fails](const AttentionBlock& /*block*/, const SoftmaxState& /*result*/) {
    if (*fails) throw LibraryError("out of memory");
    return std::string();
  };
  register_two(once, once);
  const CaseShards mine = shards();
  ShardedAttention attention = this->attention();
  attention.run(mine.local_tensors());
  *fails = true;
  EXPECT_THROW(attention.set_mask({}), AgreedFailure);
  const std::string message =
      test::message_of<LibraryError>([&] { attention.run(mine.local_tensors()); });
  EXPECT_THAT(message, HasSubstr("cannot be used any more"));
}

TEST_F(RefusalTest, TensorsThatDoNotFitALaterCallAreAFailureThatNamesTheRank) {
  register_two(nothing, nothing);
  const CaseShards mine = shards();
  ShardedAttention attention = this->attention();
  attention.run(mine.local_tensors());
  LocalTensors bad = mine.local_tensors();
  bad.query = bad.query.slice(2, 0, 3);
  const std::string message = test::message_of<LibraryError>([&] { attention.run(bad); });
  EXPECT_THAT(message, HasSubstr("rank " + std::to_string(mesh_.rank()) + ": query: got shape"));
}

// A preparation that hangs must not keep the others waiting for ever.
TEST_F(RefusalTest, APreparationThatHangsEndsInATimeout) {
  if (alone()) GTEST_SKIP() << "needs several ranks";
  using Clock = std::chrono::steady_clock;
  const Watchdog watchdog(std::chrono::milliseconds(150));
  Mesh mesh(MeshShape({{"sp", mesh_.size()}}), test::session().world(), watchdog);
  const bool hangs = mesh.rank() == mesh.size() - 1;
  bool hung = false;
  registry_ = Registry();
  add_picky(registry_, "slow", [&](const AttentionBlock& /*block*/, const SoftmaxState& /*state*/) {
    if (hangs && !std::exchange(hung, true)) {
      std::this_thread::sleep_for(2.5 * kComputingTimeouts * watchdog.timeout());
    }
    return std::string();
  });
  options_.implementation = "slow";
  const auto begin = Clock::now();
  EXPECT_THROW(ShardedAttention(problem_, operands(), mesh, registry_, device_, options_),
               LibraryError);
  if (!hangs) {
    EXPECT_LT(Clock::now() - begin, 2 * kComputingTimeouts * watchdog.timeout());
  }
  mesh_.world().barrier("end of the test");
}

}  // namespace
}  // namespace annulus::ring
