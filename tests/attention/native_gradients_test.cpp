#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "native/addition_order.hpp"
#include "tests/attention/gradients_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/random_mask.hpp"

namespace annulus::test {
namespace {

constexpr std::array kDTypes{DType::float32, DType::float16, DType::bfloat16};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> floats_of(const Tensor& tensor) {
  const auto* const entries = tensor.view().as<float>();
  return {entries, entries + tensor.shape().product()};
}

const Implementation& vanilla() {
  static const Registry registry = Registry::standard();
  return registry.get("vanilla");
}

// All gradients, one after the other.
std::vector<float> run(const Implementation& implementation, const WholeGradients& whole,
                       const BackwardBlock& block, int threads = 1) {
  whole.clear();
  whole.add(implementation, block, whole.gradients(), threads);
  std::vector<float> all;
  for (const Tensor* tensor : {&whole.query, &whole.key, &whole.value, &whole.bias}) {
    if (tensor->shape().rank() == 0) continue;
    const std::vector<float> entries = floats_of(*tensor);
    all.insert(all.end(), entries.begin(), entries.end());
  }
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_right(const WholeGradients& whole, int threads) {
  whole.add(native(), whole.block(), whole.gradients(), threads);
  EXPECT_LT(whole.largest_share(), 0.5) << to_string(whole.forward.problem.mask);
}

// Several tiles of rows and of columns, the last ones of odd lengths.
TEST(NativeGradients, EveryMask) {
  Random random(61);
  for (const std::vector<MaskKind>& kinds : kinds_beside_blocks()) {
    AttentionProblem problem = problem_of({2, 277, 531, 2, 1, 5, 6});
    problem.mask = random_mask(random, kinds, 2, 277, 531);
    expect_right(WholeGradients(random, problem), 2);
    problem = problem_of({2, 83, 301, 4, 2, 3, 4});
    problem.mask = random_mask(random, kinds, 2, 83, 301);
    problem.mask.set_block_mask(random_block_mask(random, 2, 4, 83, 301, 70));
    expect_right(WholeGradients(random, problem), 2);
  }
}

TEST(NativeGradients, EveryPositionPart) {
  Random random(62);
  for (const std::vector<MaskKind>& kinds : position_combinations()) {
    AttentionProblem problem = problem_of({2, 41, 67, 4, 2, 5, 6});
    problem.mask = random_mask(random, kinds, 2, 41, 67);
    expect_right(WholeGradients(random, problem), 2);
  }
}

TEST(NativeGradients, EveryModifier) {
  Random random(63);
  for (const DType dtype : kDTypes) {
    for (unsigned chosen = 0; chosen < 64; ++chosen) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ' ' + std::to_string(chosen));
      const auto has = [&](unsigned bit) { return (chosen >> bit & 1U) != 0; };
      AttentionProblem problem = problem_of({2, 53, 275, 6, 3, 8, 4}, dtype);
      problem.mask.set_causal(has(0));
      problem.mask.set_offset(has(0) ? 150 : 0);
      if (has(1)) problem.scale = -0.6;
      if (has(2)) problem.soft_cap = 1.5;
      if (has(3)) problem.dropout.emplace(0.3, chosen);
      if (has(4)) {
        Extents shape{2, 6, 53, 275};
        for (int dim = 0; dim < 4; ++dim) {
          if (draw(random, 0, 1) == 0) shape[dim] = 1;
        }
        problem.bias = shape;
        problem.dense_mask = Extents{1, 6, 53, 275};
      }
      if (has(5)) problem.sinks = Sinks::random(6, 2, chosen);
      expect_right(WholeGradients(random, problem), 3);
    }
  }
}

// Of heads that all read one key/value head: more than a row tile holds.
TEST(NativeGradients, ManyHeadsInAGroup) {
  Random random(64);
  AttentionProblem problem = problem_of({1, 5, 263, 300, 1, 4, 3});
  problem.mask.set_causal(true);
  problem.mask.set_offset(255);
  expect_right(WholeGradients(random, problem), 2);
}

TEST(NativeGradients, AScaleOfZero) {
  Random random(65);
  AttentionProblem problem = problem_of({1, 30, 300, 2, 1, 4, 4});
  problem.scale = 0.0;
  const WholeGradients whole(random, problem);
  expect_right(whole, 1);
  for (const float entry : floats_of(whole.key)) EXPECT_EQ(entry, 0);
}

TEST(NativeGradients, BlocksAddUp) {
  expect_blocks_add_up(native());
}

TEST(NativeGradients, ScoresByColumn) {
  Random random(66);
  AttentionProblem problem = problem_of({2, 40, 300, 4, 2, 8, 8});
  problem.bias = Extents{2, 1, 40, 300};
  problem.dense_mask = Extents{1, 4, 1, 300};
  const WholeGradients whole(random, problem);
  const std::vector<float> by_position = run(native(), whole, whole.block());
  BackwardBlock block = whole.block();
  block.scores.by_column = true;
  EXPECT_TRUE(same_bits(run(native(), whole, block), by_position));
}

TEST(NativeGradients, UnmaskedBlocksSkipTheMask) {
  Random random(67);
  AttentionProblem problem = problem_of({1, 300, 290, 2, 2, 8, 8});
  problem.mask.set_causal(true);
  problem.mask.set_offset(290);
  const WholeGradients whole(random, problem);
  BackwardBlock block = whole.block();
  const std::vector<float> masked = run(native(), whole, block);
  block.unmasked = true;
  EXPECT_TRUE(same_bits(run(native(), whole, block), masked));
}

TEST(NativeGradients, AddsToWhatIsThereAndWritesNothingElse) {
  Random random(68);
  AttentionProblem problem = problem_of({1, 40, 300, 2, 1, 4, 4});
  problem.bias = Extents{1, 1, 40, 300};
  const WholeGradients whole(random, problem);
  const Gradients all = whole.gradients();
  whole.add(native(), whole.block(), {.key = all.key});
  const std::vector<float> once = floats_of(whole.key);
  whole.add(native(), whole.block(), {.key = all.key});
  for (std::size_t i = 0; i < once.size(); ++i) {
    EXPECT_NE(once[i], 0);
    EXPECT_EQ(entry(whole.key, i), 2 * once[i]);
  }
  for (const Tensor* tensor : {&whole.query, &whole.value, &whole.bias}) {
    for (const float value : floats_of(*tensor)) EXPECT_EQ(value, 0);
  }
}

// Whatever the gradients of a bias are summed over.
TEST(NativeGradients, ThreadsDoNotChangeABit) {
  Random random(69);
  for (unsigned broadcast = 0; broadcast <= 16; ++broadcast) {
    SCOPED_TRACE(broadcast);
    AttentionProblem problem = problem_of({2, 600, 900, 4, 2, 16, 8});
    problem.mask.set_causal(true);
    problem.mask.set_offset(300);
    problem.dropout.emplace(0.1, 5);
    if (broadcast < 16) {
      Extents shape{2, 4, 600, 900};
      for (int dim = 0; dim < 4; ++dim) {
        if ((broadcast >> static_cast<unsigned>(dim) & 1U) != 0) shape[dim] = 1;
      }
      problem.bias = shape;
    }
    // Of any LSE and delta: the forward pass does not matter here.
    WholeGradients whole(random, problem_of({2, 1, 1, 4, 2, 16, 8}));
    whole.forward = random_attention(random, problem);
    whole.grad_output = random_tensor(random, DType::float32, {2, 600, 4, 8});
    const Result forward = run_native(problem, whole.forward.block());
    whole.lse = Tensor(DType::float32, {2, 4, 600}, test_memory());
    copy(forward.lse.view(), whole.lse.view());
    whole.delta = random_tensor(random, DType::float32, {2, 4, 600});
    whole.query = zeros(DType::float32, {2, 600, 4, 16});
    whole.key = zeros(DType::float32, {2, 900, 2, 16});
    whole.value = zeros(DType::float32, {2, 900, 2, 8});
    if (problem.bias) whole.bias = zeros(DType::float32, *problem.bias);
    const std::vector<float> one = run(native(), whole, whole.block(), 1);
    for (const int threads : {2, 4, 64}) {
      EXPECT_TRUE(same_bits(run(native(), whole, whole.block(), threads), one)) << threads;
    }
  }
}

// Puts an entry that is not finite into one operand, at some positions of head 0. Vanilla computes
// pair by pair, only those that see each other.
TEST(NativeGradients, WhatIsNotFiniteReachesWhatSeesIt) {
  Random random(70);
  constexpr std::int64_t kLength = 300;
  std::vector<Mask> masks(6);
  masks[0].set_causal(true);
  masks[1].set_window(40, 3);
  const std::vector<std::int32_t> ids = random_segments(random, 2, kLength);
  masks[2].set_segments(2, ids, ids);
  masks[3].set_kv_lengths({280, 150});
  masks[3].set_query_lengths({100, 299});
  masks[4].set_block_mask(BlockMask::random(kLength, kLength, 4, 0.5, 1, {64, 48}));
  for (const Mask& mask : masks) {
    for (const bool modified : {false, true}) {
      AttentionProblem problem = problem_of({2, kLength, kLength, 4, 2, 6, 4});
      problem.mask = mask;
      if (modified) {
        problem.soft_cap = 3.0;
        problem.dropout.emplace(0.3, 4);
        problem.bias = Extents{1, 4, kLength, kLength};
        problem.dense_mask = Extents{2, 1, kLength, kLength};
      }
      WholeGradients whole(random, problem);
      const std::vector<float> clean = run(native(), whole, whole.block());
      const auto spoil = [&](const Tensor& tensor, float value) {
        for (const std::int64_t row : {std::int64_t{130}, std::int64_t{299}}) {
          tensor.view().at<float>({1, row, 0, 1}) = value;
        }
      };
      for (const int operand : {0, 1, 2, 3}) {
        for (const float value : {kNan, kInfinity}) {
          SCOPED_TRACE(to_string(mask) + (modified ? ", modified" : "") + ": operand " +
                       std::to_string(operand));
          const std::array<const Tensor*, 4> operands{&whole.forward.query, &whole.forward.key,
                                                      &whole.forward.value, &whole.grad_output};
          const Tensor& tensor = *operands[static_cast<std::size_t>(operand)];
          const std::vector<float> before = floats_of(tensor);
          spoil(tensor, value);
          // Delta stays: only what the backward pass itself spreads shows.
          Tensor lse = std::move(whole.lse);
          whole.lse = filled(DType::float32, lse.shape(), whole.forward.oracle().lse);
          const std::vector<float> truth = run(vanilla(), whole, whole.block());
          const std::vector<float> got = run(native(), whole, whole.block(), 2);
          std::copy(before.begin(), before.end(), tensor.view().as<float>());
          whole.lse = std::move(lse);
          std::size_t spoilt = 0;
          for (std::size_t i = 0; i < truth.size(); ++i) {
            ASSERT_EQ(std::isfinite(got[i]), std::isfinite(truth[i])) << i;
            if (std::isfinite(truth[i])) {
              ASSERT_NEAR(got[i], truth[i], 1e-4 * (1 + std::abs(truth[i]))) << i;
            } else {
              ++spoilt;
            }
          }
          EXPECT_LT(spoilt, truth.size());
          const bool may_be_padding = problem.mask.has_segments();
          EXPECT_TRUE(spoilt > 0 || may_be_padding);
        }
      }
      EXPECT_TRUE(same_bits(run(native(), whole, whole.block()), clean));
    }
  }
}

// Rows that see nothing, or only logits of −∞, add nothing, whatever they hold.
TEST(NativeGradients, RowsWithoutWeightAddNothing) {
  Random random(71);
  AttentionProblem problem = problem_of({2, 20, 300, 2, 1, 4, 4});
  problem.bias = Extents{1, 1, 20, 300};
  problem.mask.set_kv_lengths({0, 300});
  WholeAttention operands = random_attention(random, problem);
  for (std::int64_t j = 0; j < 300; ++j) {
    operands.bias.view().at<float>({0, 0, 7, j}) = -kInfinity;
  }
  const WholeGradients whole(random, std::move(operands));
  for (std::int64_t t = 0; t < 20; ++t) {
    for (std::int64_t b = 0; b < 2; ++b) {
      if (b == 1 && t != 7) continue;
      for (std::int64_t d = 0; d < 4; ++d) {
        whole.grad_output.view().at<float>({b, t, 1, d}) = kNan;
        whole.forward.query.view().at<float>({b, t, 1, d}) = kNan;
      }
    }
  }
  for (std::int64_t j = 0; j < 300; ++j) {
    whole.forward.key.view().at<float>({0, j, 0, 2}) = kInfinity;
  }
  whole.add(native(), whole.block(), whole.gradients(), 1);
  EXPECT_LT(whole.largest_share(), 0.5);
}

TEST(NativeGradients, WorkspaceDoesNotGrowWithTheSequence) {
  Random random(72);
  const auto peak = [&](std::int64_t length) {
    AttentionProblem problem = problem_of({1, length, length, 1, 1, 16, 16}, DType::bfloat16);
    problem.mask.set_window(500, 0);
    const WholeAttention whole = random_attention(random, problem);
    const Extents rows{1, 1, length};
    const Tensor lse = zeros(DType::float32, rows);
    const Tensor grad = zeros(DType::float32, whole.query.shape());
    const BackwardBlock block{whole.query.view(), whole.key.view(), whole.value.view(),
                              whole.value.view(), lse.view(),       lse.view(),
                              whole.rows(),       whole.columns()};
    HostDevice device;
    HostStream stream("compute", Watchdog(Watchdog::Seconds(60)), nullptr);
    native()
        .make_kernel(problem, device)
        ->backward(block, {.key = grad.view()}, {stream, nullptr, 2});
    EXPECT_EQ(device.memory().statistics().in_use, 0U);
    return device.memory().statistics().peak_in_use;
  };
  const std::size_t at_4k = peak(4096);
  EXPECT_EQ(peak(16384), at_4k);
  EXPECT_LT(at_4k, std::size_t{2} << 20) << "for two threads";
}

class FailingStream final : public Stream {
 public:
  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] std::shared_ptr<Event> record() override { return nullptr; }
  void wait(std::shared_ptr<Event> /*event*/) override {}
  void synchronize(const Waiting& /*waiting*/) override {}
  void progress() override { throw TimeoutError("peer is gone"); }
  void begin_span(TraceLabel /*label*/) override {}
  void end_span() override {}

 private:
  std::string name_ = "background";
};

// No thread waits for ever for one that failed.
TEST(NativeGradients, AnErrorWhileComputingComesOut) {
  Random random(73);
  const WholeGradients whole(random, problem_of({1, 520, 520, 1, 1, 4, 4}));
  HostStream stream("compute", Watchdog(Watchdog::Seconds(60)), nullptr);
  HostDevice device;
  const auto kernel = native().make_kernel(whole.forward.problem, device);
  for (const int threads : {1, 3}) {
    FailingStream background;
    EXPECT_THROW(kernel->backward(whole.block(), whole.gradients(), {stream, &background, threads}),
                 TimeoutError);
  }
  whole.clear();
  expect_right(whole, 2);
}

TEST(NativeGradients, BlocksThatDoNotFitAreRefused) {
  Random random(74);
  const WholeGradients whole(random, problem_of({1, 9, 9, 2, 1, 4, 4}));
  BackwardBlock block = whole.block();
  block.grad_output = block.grad_output.slice(1, 0, 8);
  EXPECT_THROW(whole.add(native(), block, whole.gradients()), InternalError);
  Gradients gradients = whole.gradients();
  gradients.bias = gradients.query;
  EXPECT_THROW(whole.add(native(), whole.block(), gradients), InternalError);
}

TEST(NativeGradients, AutoTakesThemFirstOnCpus) {
  AttentionProblem problem = problem_of({1, 9, 9, 2, 1, 4, 4});
  const Registry registry = Registry::standard();
  const auto names = [&] {
    std::vector<std::string> all;
    const Selection selection =
        registry.select("auto", problem, Place::host(), Presence::required, Pass::backward);
    for (const Implementation* candidate : selection.candidates) {
      all.push_back(candidate->names().front());
    }
    return all;
  };
  EXPECT_EQ(names(), (std::vector<std::string>{"native", "vanilla"}));
  EXPECT_TRUE(native().fits_backward(problem, Place::host()));
  EXPECT_TRUE(native().fits_backward(problem, Place::cuda(0)));
  problem.dtype = DType::float64;
  EXPECT_EQ(names(), std::vector<std::string>{"vanilla"});
  problem.dtype = DType::float32;
  problem.normalize_output = false;
  EXPECT_FALSE(native().fits_backward(problem, Place::host()));
}

TEST(AdditionOrder, TasksOfAChainTakeTurns) {
  AdditionOrder order({0, 1, 0}, 3, false);
  const auto waits = [&](std::int64_t task, std::int64_t step) {
    try {
      order.wait(task, step, [] { throw TimeoutError("would wait"); });
      return false;
    } catch (const TimeoutError&) {
      return true;
    }
  };
  EXPECT_FALSE(waits(0, 0));
  EXPECT_FALSE(waits(1, 2));
  EXPECT_TRUE(waits(2, 0));
  order.pass(0, 1);
  EXPECT_FALSE(waits(2, 1));
  EXPECT_TRUE(waits(2, 2));
  order.leave(0);
  EXPECT_FALSE(waits(2, 2));
}

}  // namespace
}  // namespace annulus::test
