#include "cost/cost.hpp"

#include <algorithm>
#include <cstddef>

namespace annulus::ring {
namespace {

// Kernels that await columns run on Hopper GPUs: 132 multiprocessors with 128 rows each.
constexpr double kRowsAtOnce = 132 * 128;
// The longest tiles are computed first. Under a causal mask they take twice the mean.
constexpr double kLongestTile = 2;

double bytes_of(const RankPlan& plan, const Region& region) {
  const Buffer& buffer = plan.buffer(region.buffer);
  const double all =
      static_cast<double>(plan.token_bytes(buffer)) * static_cast<double>(region.tokens.count);
  const std::int64_t whole = buffer.heads.count * plan.local.batch;
  return whole == 0 ? 0
                    : all * static_cast<double>(region.heads.count * region.batches.count) /
                          static_cast<double>(whole);
}

}  // namespace

double seconds_of(const RankPlan& plan, const Block& block, const Prices& prices) {
  double seconds =
      prices.kernel(plan.implementations[static_cast<std::size_t>(block.implementation)])
          .seconds(plan.flops(block), static_cast<double>(block.rows.count));
  if (block.state) {
    seconds += kPassesToContinue * prices.model.memory_seconds(bytes_of(plan, block.state->output));
  }
  return seconds;
}

double seconds_before_waiting(const RankPlan& plan, const Block& block, std::int64_t columns,
                              const Prices& prices) {
  const auto rows = static_cast<double>(block.rows.count * block.batches.count);
  const double all_columns = static_cast<double>(block.columns.count);
  const double longest =
      std::min(kLongestTile, rows * all_columns / static_cast<double>(block.pairs));
  const double at_once =
      std::min(1.0, longest * kRowsAtOnce / (rows * static_cast<double>(block.heads.count)));
  return seconds_of(plan, block, prices) * at_once * static_cast<double>(columns) / all_columns;
}

double seconds_of(const RankPlan& plan, const Copy& copy, const Prices& prices) {
  const double bytes = static_cast<double>(copy.to.tokens.count * copy.to.heads.count *
                                           copy.to.batches.count * plan.width(copy.content)) *
                       static_cast<double>(size_of(plan.buffer(copy.to.buffer).dtype));
  return prices.model.memory_seconds(2 * bytes);
}

// LSE and maximum are negligible beside the outputs.
double seconds_of(const RankPlan& plan, const Reduce& reduce, const Prices& prices) {
  double bytes = bytes_of(plan, reduce.into.output);
  for (const Result& part : reduce.parts) bytes += bytes_of(plan, part.output);
  return prices.model.memory_seconds(bytes);
}

// Messages sent together follow each other without a pause, so the fixed cost of a message counts
// once.
double seconds_of(const std::vector<Transfer>& transfers, const Prices& prices) {
  const double pause = prices.model.transfer_seconds(0);
  double seconds = transfers.empty() ? 0 : pause;
  for (const Transfer& transfer : transfers) {
    seconds += prices.model.transfer_seconds(static_cast<double>(transfer.bytes)) - pause;
  }
  return seconds;
}

}  // namespace annulus::ring
