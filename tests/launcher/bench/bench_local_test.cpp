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

#include <annulus/verification/verification.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/support/host_context.hpp"

namespace annulus::launcher {
namespace {

using Watch = std::function<void(const AttentionBlock& block)>;

// Shows the blocks that it is asked to compute.
class WatchedKernel final : public Kernel {
 public:
  WatchedKernel(std::unique_ptr<Kernel> kernel, const Watch& watch)
      : kernel_(std::move(kernel)), watch_(watch) {}
  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    if (watch_) watch_(block);
    kernel_->forward(block, result, context);
  }

 private:
  std::unique_ptr<Kernel> kernel_;
  const Watch& watch_;
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
          return std::make_unique<WatchedKernel>(std::move(native), watch_);
        }));
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

}  // namespace
}  // namespace annulus::launcher
