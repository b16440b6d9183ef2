#pragma once

#include <vector>

#include <annulus/ring/cost_curve.hpp>

namespace annulus::launcher {

/// The work and the time of one call of a kernel.
struct BlockTime {
  double rows = 0;
  double flops = 0;  ///< operations, divided by the share of the device that they use
  double seconds = 0;
};

/// The parts of a kernel's time: seconds = call + flops / rate.
struct CallAndRates {
  double call = 0;                            ///< seconds
  std::vector<ring::CostCurve::Point> rates;  ///< operations per second by rows, one or more
};

/// Splits the times of a smallest block and one or more larger ones, in ascending order of rows.
/// The computation of the smallest block, at the rate at which time grows towards the next larger
/// block, is not part of the call. The call takes at least `least_call`. Blocks whose time is
/// mostly the call say little about the rate, so they are left out unless there are no others.
[[nodiscard]] CallAndRates call_and_rates(const BlockTime& smallest,
                                          const std::vector<BlockTime>& blocks, double least_call);

}  // namespace annulus::launcher
