// How the native kernel computes gradients on the CPU: threads, workspace and errors.
#include <cstddef>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "native/addition_order.hpp"
#include "tests/attention/gradients_run.hpp"
#include "tests/attention/native/callback_stream.hpp"

namespace annulus::test {
namespace {

// Whatever the gradients of a bias are summed over.
TEST(NativeGradients, ThreadsDoNotChangeABit) {
  Random random(69);
  for (unsigned broadcast = 0; broadcast <= 16; ++broadcast) {
    SCOPED_TRACE(broadcast);
    AttentionProblem problem = causal_problem_of({2, 600, 900, 4, 2, 16, 8}, DType::float32, 300);
    problem.dropout.emplace(0.1, 5);
    if (broadcast < 16) {
      Extents shape{2, 4, 600, 900};
      for (int dim = 0; dim < 4; ++dim) {
        if ((broadcast >> static_cast<unsigned>(dim) & 1U) != 0) shape[dim] = 1;
      }
      problem.bias = shape;
    }
    // LSE and delta may be anything: the forward pass does not matter here.
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
    const std::vector<float> one = run(gradients_by(native(), 1), whole, whole.block());
    for (const int threads : {2, 4, 64}) {
      EXPECT_TRUE(same_bits(run(gradients_by(native(), threads), whole, whole.block()), one))
          << threads;
    }
  }
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
    Cpu cpu;
    native()
        .make_kernel(problem, cpu.device)
        ->backward(block, {.key = grad.view()}, cpu.context(2));
    EXPECT_EQ(cpu.device.memory().statistics().in_use, 0U);
    return cpu.device.memory().statistics().peak_in_use;
  };
  const std::size_t at_4k = peak(4096);
  EXPECT_EQ(peak(16384), at_4k);
  EXPECT_LT(at_4k, std::size_t{3} << 20) << "for two threads";
}

// No thread waits for ever for one that failed.
TEST(NativeGradients, AnErrorWhileComputingComesOut) {
  Random random(73);
  const WholeGradients whole(random, problem_of({1, 520, 520, 1, 1, 4, 4}));
  Cpu cpu;
  const auto kernel = native().make_kernel(whole.forward.problem, cpu.device);
  for (const int threads : {1, 3}) {
    CallbackStream background([] { throw TimeoutError("peer is gone"); });
    EXPECT_THROW(
        kernel->backward(whole.block(), whole.gradients(), cpu.context(threads, &background)),
        TimeoutError);
  }
  whole.clear();
  whole.add(native(), whole.block(), whole.gradients(), 2);
  EXPECT_LT(whole.largest_share(), 0.5);
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
