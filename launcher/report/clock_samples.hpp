#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// Readings of a rank's clock before and after barriers that it shared with all others: enough to
/// compare the clocks of two nodes, which count from different moments.
struct ClockSamples {
  std::vector<std::int64_t> before;
  std::vector<std::int64_t> after;
};

/// Collective over the group: `rounds` barriers.
[[nodiscard]] ClockSamples sample_clock(Control& group, int rounds,
                                        const std::function<std::int64_t()>& clock);

/// How far a clock is ahead of another one. Nobody leaves a barrier before everybody has entered
/// it, so each round bounds the answer from both sides: this is the middle of what all rounds
/// allow.
[[nodiscard]] std::int64_t clock_offset(const ClockSamples& clock, const ClockSamples& reference);

}  // namespace annulus::launcher
