#include "launcher/bench/calibration/call_and_rates.hpp"

#include <algorithm>

namespace annulus::launcher {
namespace {

double call_of(const BlockTime& smallest, const std::vector<BlockTime>& blocks, double least) {
  const auto larger = std::find_if(blocks.begin(), blocks.end(), [&](const BlockTime& block) {
    return block.flops > smallest.flops;
  });
  double call = smallest.seconds;
  if (larger != blocks.end() && larger->seconds > smallest.seconds) {
    call -=
        smallest.flops * (larger->seconds - smallest.seconds) / (larger->flops - smallest.flops);
  }
  return std::clamp(call, std::min(least, smallest.seconds), smallest.seconds);
}

}  // namespace

CallAndRates call_and_rates(const BlockTime& smallest, const std::vector<BlockTime>& blocks,
                            double least_call) {
  CallAndRates result{call_of(smallest, blocks, least_call), {}};
  for (const BlockTime& block : blocks) {
    if (block.seconds < 2 * result.call) continue;
    result.rates.push_back({block.rows, block.flops / (block.seconds - result.call)});
  }
  if (result.rates.empty()) {
    const BlockTime& last = blocks.back();
    result.rates.push_back(
        {last.rows, last.flops / std::max(last.seconds - result.call, last.seconds / 2)});
  }
  return result;
}

}  // namespace annulus::launcher
