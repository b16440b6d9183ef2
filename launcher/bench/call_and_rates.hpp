#pragma once

#include <vector>

#include <annulus/ring/cost_curve.hpp>

namespace annulus::launcher {

/// The work and the time of one call of a kernel.
struct BlockTime {
  double rows = 0;
  double flops = 0;  ///< operations, over the share of the device that they use
  double seconds = 0;
};

/// Times of a kernel taken apart: seconds = call + flops / rate.
struct CallAndRates {
  double call = 0;                            ///< seconds
  std::vector<ring::CostCurve::Point> rates;  ///< operations per second by rows, one or more
};

/// From the time of a block as small as there are, and those of some larger ones, one or more, in
/// ascending order of rows. Even the smallest block is computed: what this takes, at the rate with
/// which time grows towards the next larger block, is no part of the call, which takes
/// `least_call` at least. Blocks of which the call takes more than half say little of the rate and
/// are left out, unless there are only such.
[[nodiscard]] CallAndRates call_and_rates(const BlockTime& smallest,
                                          const std::vector<BlockTime>& blocks, double least_call);

}  // namespace annulus::launcher
