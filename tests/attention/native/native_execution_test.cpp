// How the native kernel runs: threads, workspace, streams and errors.
#include <algorithm>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <cblas.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/attention/native/callback_stream.hpp"
#include "tests/attention/native_run.hpp"
#include "tests/attention/problem_of.hpp"

namespace annulus::test {
namespace {

WholeAttention causal_attention(Random& random, std::int64_t rows, std::int64_t columns) {
  AttentionProblem problem =
      causal_problem_of({2, rows, columns, 4, 2, 32, 16}, DType::float32, columns - rows);
  return random_attention(random, problem);
}

TEST(NativeExecution, WorkspaceDoesNotGrowWithTheSequence) {
  Random random(23);
  const auto peak = [&](std::int64_t rows, std::int64_t columns, DType dtype) {
    AttentionProblem problem = problem_of({1, rows, columns, 1, 1, 16, 16}, dtype);
    problem.mask.set_window(1000, 0);
    const WholeAttention whole = random_attention(random, problem);
    const Result result(whole.block());
    Cpu cpu;
    native()
        .make_kernel(problem, cpu.device)
        ->forward(whole.block(), result.state(), cpu.context(2));
    EXPECT_EQ(cpu.device.memory().statistics().in_use, 0U);
    return cpu.device.memory().statistics().peak_in_use;
  };
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const std::size_t at_32k = peak(32768, 32768, dtype);
    EXPECT_EQ(peak(65536, 65536, dtype), at_32k);
    EXPECT_LT(at_32k, std::size_t{2} << 20) << "for two threads";
  }
}

TEST(NativeExecution, MovesTheBackgroundOnFromTheCallingThreadOnly) {
  Random random(24);
  const WholeAttention whole = causal_attention(random, 600, 2100);
  for (const int threads : {1, 3}) {
    int calls = 0;
    bool elsewhere = false;
    const std::thread::id caller = std::this_thread::get_id();
    CallbackStream background([&] {
      ++calls;
      elsewhere = elsewhere || std::this_thread::get_id() != caller;
    });
    const Result result(whole.block());
    forward_on_cpu(native(), whole.problem, whole.block(), result.state(), threads, &background);
    EXPECT_FALSE(elsewhere);
    // One thread pauses after each of at least 4 column tiles of each of 5 row tiles of 2 kv heads
    // in 2 batches; of three threads, the caller does some of that or waits.
    EXPECT_GE(calls, threads == 1 ? 80 : 1);
    EXPECT_TRUE(result == run_native(whole.problem, whole.block()));
  }
}

TEST(NativeExecution, AnErrorWhileComputingComesOut) {
  Random random(25);
  const WholeAttention whole = causal_attention(random, 600, 600);
  for (const int threads : {1, 3}) {
    CallbackStream background([] { throw TimeoutError("peer is gone"); });
    const Result result(whole.block());
    EXPECT_THROW(forward_on_cpu(native(), whole.problem, whole.block(), result.state(), threads,
                                &background),
                 TimeoutError);
  }
  const OracleOutput truth = whole.oracle();
  expect_accurate(run_native(whole.problem, whole.block(), 2), whole, truth);
}

// OpenBLAS has one number of threads for the whole process, which belongs to the caller.
TEST(NativeExecution, LeavesTheThreadsOfBlasAsTheyWere) {
  Random random(29);
  const WholeAttention whole = causal_attention(random, 600, 600);
  const int before = openblas_get_num_threads();
  for (const int threads : {1, 2}) {
    openblas_set_num_threads(threads);
    int most = 0;
    CallbackStream background([&] { most = std::max(most, openblas_get_num_threads()); });
    const Result result(whole.block());
    forward_on_cpu(native(), whole.problem, whole.block(), result.state(), 2, &background);
    EXPECT_EQ(most, 1) << "while our own threads multiply";
    EXPECT_EQ(openblas_get_num_threads(), threads);
    // Also after an error, and after calls of several threads at once.
    CallbackStream failing([] { throw TimeoutError("peer is gone"); });
    EXPECT_THROW(
        forward_on_cpu(native(), whole.problem, whole.block(), result.state(), 2, &failing),
        TimeoutError);
    EXPECT_EQ(openblas_get_num_threads(), threads);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back([&] { (void)run_native(whole.problem, whole.block()); });
    }
    for (std::thread& caller : callers) caller.join();
    EXPECT_EQ(openblas_get_num_threads(), threads);
  }
  openblas_set_num_threads(before);
}

TEST(NativeExecution, WaitsForEarlierWorkOfItsStream) {
  Random random(26);
  const WholeAttention whole = causal_attention(random, 8, 8);
  // The query arrives only when the operation has been tested a few times.
  class LateQuery final : public HostOperation {
   public:
    LateQuery(TensorView query, float value) : query_(query), value_(value) {}
    void start() override {}
    bool test() override {
      if (++tests_ < 5) return false;
      std::fill_n(query_.as<float>(), query_.elements(), value_);
      return true;
    }
    [[nodiscard]] std::string describe() const override { return "waiting for the query"; }
    [[nodiscard]] TraceLabel label() const override { return {}; }

   private:
    TensorView query_;
    float value_;
    int tests_ = 0;
  };
  Cpu cpu;
  cpu.stream.submit(std::make_unique<LateQuery>(whole.query.view(), 0.25F));
  const Result result(whole.block());
  native()
      .make_kernel(whole.problem, cpu.device)
      ->forward(whole.block(), result.state(), cpu.context());
  EXPECT_EQ(*whole.query.view().as<float>(), 0.25F);
  EXPECT_TRUE(result == run_native(whole.problem, whole.block()));
}

TEST(NativeExecution, RefusesBlocksThatDoNotFit) {
  Random random(27);
  const WholeAttention whole = causal_attention(random, 8, 8);
  const AttentionBlock good = whole.block();
  const auto refused = [&](const std::function<void(AttentionBlock&)>& spoil) {
    AttentionBlock block = good;
    spoil(block);
    const Result result(good);
    EXPECT_THROW(forward_on_cpu(native(), whole.problem, block, result.state()), InternalError);
  };
  refused([](AttentionBlock& block) { block.rows = PositionRanges::all(7); });
  refused([](AttentionBlock& block) { block.columns = PositionRanges::all(9); });
  refused([](AttentionBlock& block) { block.key = block.key.slice(3, 0, 31); });
  refused([](AttentionBlock& block) { block.value = block.value.slice(1, 0, 7); });
  refused([](AttentionBlock& block) { block.value = block.value.slice(3, 0, 15); });
  refused([](AttentionBlock& block) { block.query = block.query.slice(2, 0, 3); });
  refused([](AttentionBlock& block) { block.query = block.query.permute({0, 1, 3, 2}); });
}

}  // namespace
}  // namespace annulus::test
