#include "launcher/bench/bench_local.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/verification/gradient_shards.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/support/host_context.hpp"

namespace annulus::launcher {
namespace {

using Watch = std::function<void(const AttentionBlock& block)>;
using BackwardWatch = std::function<void(const BackwardBlock& block, const Gradients& gradients)>;

// Shows the blocks that it is asked to compute.
class WatchedKernel final : public Kernel {
 public:
  WatchedKernel(std::unique_ptr<Kernel> kernel, const Watch& watch, const BackwardWatch& backward)
      : kernel_(std::move(kernel)), watch_(watch), backward_(backward) {}
  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    if (watch_) watch_(block);
    kernel_->forward(block, result, context);
  }
  void backward(const BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    if (backward_) backward_(block, gradients);
    kernel_->backward(block, gradients, context);
  }

 private:
  std::unique_ptr<Kernel> kernel_;
  const Watch& watch_;
  const BackwardWatch& backward_;
};

// Entries of the tests tell their batch, head and key, but not their row: rows of other ranks are
// replaced by the rank's own.
float bias_entry(std::int64_t batch, std::int64_t head, std::int64_t key) {
  return static_cast<float>((batch * 16 + head) * 2048 + key);
}
std::uint8_t mask_entry(std::int64_t batch, std::int64_t head, std::int64_t key) {
  return (batch + head + key) % 3 == 0 ? 0 : 1;
}

template <class Entry>
void fill(const TensorView& part, std::span<const PositionRanges> index, const Entry& entry) {
  const auto global = [&](std::size_t dim, std::int64_t i) {
    return index[dim].global(LocalPosition(i)).value();
  };
  for (std::int64_t b = 0; b < part.size(0); ++b) {
    for (std::int64_t n = 0; n < part.size(1); ++n) {
      for (std::int64_t t = 0; t < part.size(2); ++t) {
        for (std::int64_t s = 0; s < part.size(3); ++s) {
          const auto value = entry(global(0, b), global(1, n), global(3, s));
          part.at<std::remove_const_t<decltype(value)>>({b, n, t, s}) = value;
        }
      }
    }
  }
}

// The entries of one rank, with as many again behind them that nobody may read: a bias of NaN, a
// mask of 2.
class Guarded {
 public:
  Guarded(const Tensor& entries, int unread)
      : memory_(entries.dtype(), {2, entries.view().elements()}, pool_), shape_(entries.shape()) {
    std::memset(memory_.view().data(), unread, memory_.bytes());
    copy(entries.view(), view());
  }
  [[nodiscard]] TensorView view() const { return {memory_.view().data(), memory_.dtype(), shape_}; }

 private:
  HostMemoryPool pool_;
  Tensor memory_;
  Extents shape_;
};

class LocalBlocksTest : public ::testing::Test {
 protected:
  LocalBlocksTest() : context_(test::session().world(), test::on_host()) {
    problem_.shape = {2, 48, 48, 8, 4, 4, 4};
    problem_.layout = LayoutKind::striped;
    context_.registry() = Registry();
    context_.registry().add(
        std::make_unique<test::WrappedNative>("watched", [this](std::unique_ptr<Kernel> native) {
          return std::make_unique<WatchedKernel>(std::move(native), watch_, backward_watch_);
        }));
  }

  // Each block of the backward plan is computed once, with operands and gradients of its sizes and
  // positions; together they see the rank's part of all visible pairs.
  void expect_backward_blocks(const std::string& schedule) {
    problem_.schedule = schedule;
    Attention attention(context_, problem_);
    attention.prepare_backward();
    HostMemoryPool host;
    const verification::CaseShards shards(attention.operands(), problem_.dtype, 1, context_.rank(),
                                          host, 1, {});
    const ring::LocalTensors forward = shards.local_tensors();
    attention.run_and_wait(forward);
    verification::GradientShards gradient_shards(attention.operands(), problem_, {}, 1, context_);
    gradient_shards.upload();
    const ring::ShardedAttention& pass = *attention.backward_pass();
    LocalBlocks local(problem_, pass, gradient_shards.tensors(forward), context_);

    const std::vector<const ring::BackwardBlock*> blocks =
        pass.rank_plan().all<ring::BackwardBlock>();
    std::size_t computed = 0;
    backward_watch_ = [&](const BackwardBlock& block, const Gradients& gradients) {
      ASSERT_LT(computed, blocks.size());
      const ring::BackwardBlock& planned = *blocks[computed++];
      const std::int64_t batches = planned.batches.count;
      const std::int64_t heads = planned.heads.count;
      EXPECT_EQ(block.rows, planned.row_positions);
      EXPECT_EQ(block.columns, planned.column_positions);
      EXPECT_EQ(block.query.shape(), (Extents{batches, planned.rows.count, heads, 4}));
      EXPECT_EQ(block.grad_output.shape(), (Extents{batches, planned.rows.count, heads, 6}));
      EXPECT_EQ(block.lse.shape(), (Extents{batches, heads, planned.rows.count}));
      EXPECT_EQ(block.delta.shape(), block.lse.shape());
      EXPECT_EQ(block.key.size(1), planned.columns.count);
      EXPECT_EQ(gradients.query.shape(), block.query.shape());
      EXPECT_EQ(gradients.key.shape(), block.key.shape());
      EXPECT_EQ(gradients.value.shape(), block.value.shape());
      EXPECT_EQ(gradients.bias.rank(), 0);
    };
    for (int run = 1; run <= 2; ++run) {
      local.run();
      EXPECT_EQ(computed, blocks.size());
      computed = 0;
    }
    backward_watch_ = nullptr;
  }

  // The blocks of the plan, computed alone, must be given just their entries of bias and mask.
  void expect_entries_of_blocks(const std::string& schedule) {
    problem_.schedule = schedule;
    const Attention attention(context_, problem_);
    const verification::OperandFills fills{
        [](const TensorView& part, auto index) { fill(part, index, bias_entry); },
        [](const TensorView& part, auto index) { fill(part, index, mask_entry); }};
    HostMemoryPool host;
    const verification::CaseShards shards(attention.operands(), problem_.dtype, 1, context_.rank(),
                                          host, 1, fills);
    ring::LocalTensors tensors = shards.local_tensors();
    const Guarded bias(problem_.bias ? shards.bias : shards.lse, 0xff);
    const Guarded mask(problem_.dense_mask ? shards.mask : shards.lse, 2);
    if (problem_.bias) tensors.bias = bias.view();
    if (problem_.dense_mask) tensors.mask = mask.view();
    LocalBlocks local(problem_, attention, tensors, context_);

    const std::vector<const ring::Block*> blocks = attention.rank_plan().all<ring::Block>();
    std::size_t computed = 0;
    watch_ = [&](const AttentionBlock& block) {
      ASSERT_LT(computed, blocks.size());
      expect_entries(block, attention.rank_plan(), *blocks[computed++]);
    };
    local.run();
    watch_ = nullptr;
    EXPECT_EQ(computed, blocks.size());
  }

  void expect_entries(const AttentionBlock& block, const ring::RankPlan& plan,
                      const ring::Block& planned) {
    const auto cut = [&](int buffer) { return buffer >= 0 && plan.buffer(buffer).columns; };
    EXPECT_EQ(block.scores.by_column, cut(planned.bias) || cut(planned.dense_mask));
    cut_ = cut_ || block.scores.by_column;
    if (plan.local.query_length == 0) return;  // nothing to repeat: undefined
    std::int64_t wrong = 0;
    const Extents& shape = block.query.shape();
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t n = 0; n < shape[2]; ++n) {
        for (std::int64_t t = 0; t < shape[1]; ++t) {
          for (std::int64_t s = 0; s < block.columns.size(); ++s) {
            const GlobalPosition key = block.columns.global(LocalPosition(s));
            const std::int64_t entry = block.scores.key_of(s, key);
            const auto expected = [&](const std::optional<Extents>& scores, const auto& entry_of) {
              return entry_of((*scores)[0] == 1 ? 0 : block.first_batch + b,
                              (*scores)[1] == 1 ? 0 : block.first_head + n,
                              (*scores)[3] == 1 ? 0 : key.value());
            };
            if (problem_.bias && block.scores.bias->at<float>({b, n, t, entry}) !=
                                     expected(problem_.bias, bias_entry)) {
              ++wrong;
            }
            if (problem_.dense_mask && block.scores.mask->at<std::uint8_t>({b, n, t, entry}) !=
                                           expected(problem_.dense_mask, mask_entry)) {
              ++wrong;
            }
          }
        }
      }
    }
    EXPECT_EQ(wrong, 0);
  }

  Context context_;
  AttentionOptions problem_;
  Watch watch_;
  BackwardWatch backward_watch_;
  bool cut_ = false;  // whether a block had entries of its own keys only
};

TEST_F(LocalBlocksTest, ReadBiasAndMaskOfTheirRowsAlone) {
  const Extents whole{2, 8, 48, 48};
  const std::vector<std::pair<std::optional<Extents>, std::optional<Extents>>> cases{
      {whole, {}},
      {{}, whole},
      {whole, Extents{1, 1, 48, 48}},
      {Extents{1, 8, 48, 48}, Extents{2, 1, 1, 48}},
      {Extents{2, 1, 48, 1}, Extents{1, 8, 1, 1}}};
  for (const char* schedule : {"ring", "allgather", "ulysses", "hybrid", "pass_q"}) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(schedule + (" " + std::to_string(i)));
      std::tie(problem_.bias, problem_.dense_mask) = cases[i];
      cut_ = false;
      expect_entries_of_blocks(schedule);
      EXPECT_EQ(cut_, std::string(schedule) == "pass_q" && context_.size() > 1);
    }
  }
}

// More rows than pass_q gathers go round.
TEST_F(LocalBlocksTest, ReadBiasAndMaskOfRowsThatGoRound) {
  problem_.shape = {1, 1200, 1200, 4, 2, 4, 4};
  problem_.bias = Extents{1, 4, 1200, 1200};
  problem_.dense_mask = Extents{1, 1, 1200, 1200};
  expect_entries_of_blocks("pass_q");
}

TEST_F(LocalBlocksTest, RunOnRanksWithoutRows) {
  problem_.shape.query_length = 2;
  problem_.bias = Extents{2, 8, 2, 48};
  for (const char* schedule : {"ring", "ulysses", "pass_q"}) {
    SCOPED_TRACE(schedule);
    expect_entries_of_blocks(schedule);
  }
}

TEST_F(LocalBlocksTest, ComputeTheBlocksOfTheBackwardPass) {
  problem_.shape.value_dim = 6;
  problem_.mask.set_causal(true);
  problem_.bias = Extents{1, 8, 48, 48};
  for (const char* schedule : {"ring", "allgather", "ulysses"}) {
    SCOPED_TRACE(schedule);
    expect_backward_blocks(schedule);
  }
  problem_.bias.reset();
  problem_.shape.query_length = 2;
  expect_backward_blocks("ring");
}

}  // namespace
}  // namespace annulus::launcher
