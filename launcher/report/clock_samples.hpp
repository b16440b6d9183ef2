#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// Readings of a rank's clock before and after barriers of all ranks. They serve to compare the
/// clocks of two nodes, which count from different moments.
struct ClockSamples {
  std::vector<std::int64_t> before;
  std::vector<std::int64_t> after;
};

/// Collective over the group: `rounds` barriers.
[[nodiscard]] ClockSamples sample_clock(Control& group, int rounds,
                                        const std::function<std::int64_t()>& clock);

/// The lead of a clock over another one. No rank leaves a barrier before all have entered it, so
/// each round bounds the answer from both sides. Returns the middle of the interval that all rounds
/// allow.
[[nodiscard]] std::int64_t clock_offset(const ClockSamples& clock, const ClockSamples& reference);

}  // namespace annulus::launcher
