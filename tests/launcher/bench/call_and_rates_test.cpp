#include "launcher/bench/calibration/call_and_rates.hpp"

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/ring/simulate.hpp>
#include <annulus/ring/used_share.hpp>

#include "tests/ring/sequence_plan.hpp"

namespace annulus::launcher {
namespace {

constexpr double kLeast = 2e-6;

// The clock of a machine whose calls take `call` seconds besides the operations, 1e6 per row
// squared.
BlockTime timed(double rows, double call, const std::function<double(double)>& rate) {
  const double flops = 1e6 * rows * rows;
  return {rows, flops, call + flops / rate(rows)};
}

CallAndRates measured(double call, const std::function<double(double)>& rate,
                      double smallest = 128) {
  std::vector<BlockTime> blocks;
  for (const double rows : {1024.0, 2048.0, 4096.0}) blocks.push_back(timed(rows, call, rate));
  return call_and_rates(timed(smallest, call, rate), blocks, kLeast);
}

// The smallest block takes 16 ms, of which the call takes 10 µs.
TEST(CallAndRates, TheSmallestBlockIsMoreThanItsCall) {
  const CallAndRates found = measured(10e-6, [](double) { return 1e12; });
  EXPECT_NEAR(found.call, 10e-6, 1e-9);
  ASSERT_EQ(found.rates.size(), 3U);
  for (const auto& point : found.rates) EXPECT_NEAR(point.value, 1e12, 1e6);
  EXPECT_EQ(found.rates[2].size, 4096);
}

TEST(CallAndRates, RatesMayDependOnTheRows) {
  const auto rate = [](double rows) { return 1e15 * rows / (rows + 1000); };
  const CallAndRates found = measured(10e-6, rate, 1);
  EXPECT_NEAR(found.call, 10e-6, 1e-6);
  for (const auto& point : found.rates) {
    EXPECT_NEAR(point.value, rate(point.size), 1e-3 * rate(point.size));
  }
}

TEST(CallAndRates, ACallTakesNeitherLessThanTheLeastNorMoreThanTheSmallestBlock) {
  // The smaller the block, the faster: its operations would take longer than it does.
  const CallAndRates slower = measured(0, [](double rows) { return 1e15 / rows; });
  EXPECT_EQ(slower.call, kLeast);
  // A larger block that takes no longer.
  const CallAndRates level =
      call_and_rates({1, 1e6, 30e-6}, {{64, 1e9, 29e-6}, {512, 1e12, 1e-3}}, kLeast);
  EXPECT_EQ(level.call, 30e-6);
  // A machine faster than the least.
  EXPECT_EQ(call_and_rates({1, 1e6, 1e-6}, {{64, 1e9, 1e-3}}, kLeast).call, 1e-6);
}

TEST(CallAndRates, BlocksThatAreMostlyCallsAreLeftOut) {
  const BlockTime smallest{1, 0, 10e-6};
  const BlockTime small{64, 1e9, 19e-6};
  const BlockTime large{512, 1e11, 30e-6};
  const CallAndRates found = call_and_rates(smallest, {small, large}, kLeast);
  ASSERT_EQ(found.rates.size(), 1U);
  EXPECT_EQ(found.rates[0].size, 512);
  EXPECT_NEAR(found.rates[0].value, 1e11 / 20e-6, 1);
  // The largest one stays, at no more than twice the rate of its whole time.
  const CallAndRates alone = call_and_rates(smallest, {small}, kLeast);
  ASSERT_EQ(alone.rates.size(), 1U);
  EXPECT_NEAR(alone.rates[0].value, 1e9 / 9.5e-6, 1);
}

// Seconds that a plan predicts of a causal square on one GPU whose memory takes none.
double predicted(const AttentionProblem& problem, const ring::KernelCost& cost) {
  const ring::Plan plan =
      ring::sequence_plan(problem, 1, LayoutKind::contiguous, ring::Schedule::local);
  ring::CostModel model = ring::CostModel::hopper_nvlink();
  model.merge_bytes_per_second = 1e30;
  model.launch_seconds = 0;
  return ring::predicted_seconds(plan, {std::move(model), {{"native", cost}}});
}

// However few its tiles are for the multiprocessors, and however unevenly they end.
TEST(CallAndRates, ABlockOfTheMeasuredSizeCostsWhatWasMeasured) {
  constexpr std::int64_t kTile = 128;
  for (const auto& [heads, rows] : {std::pair{1, 1024},
                                    {8, 1024},
                                    {32, 1024},
                                    {64, 4096},
                                    // a last tile that is not full
                                    {8, 1100}}) {
    const AttentionProblem problem = ring::causal_problem(rows, heads, heads);
    const std::int64_t pairs = std::int64_t{rows} * (rows + 1) / 2;
    const double share =
        ring::used_share(Place::Kind::cuda, {rows, rows, heads, problem.shape.batch, pairs}, kTile);
    constexpr double kSeconds = 300e-6;
    const BlockTime block{static_cast<double>(rows),
                          forward_flops(problem.shape, static_cast<double>(pairs)) / share,
                          kSeconds};
    CallAndRates found = call_and_rates({128, block.flops / 1e6, 10e-6}, {block}, kLeast);
    ring::KernelCost cost{"a test", ring::CostCurve(std::move(found.rates), "test"), found.call};
    cost.row_tile = kTile;
    EXPECT_NEAR(predicted(problem, cost), kSeconds, 1e-9) << heads << " heads, " << rows;
  }
}

}  // namespace
}  // namespace annulus::launcher
