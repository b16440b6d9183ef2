#include "launcher/report/clock_samples.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace annulus::launcher {

ClockSamples sample_clock(Control& group, int rounds, const std::function<std::int64_t()>& clock) {
  ClockSamples samples;
  for (int i = 0; i < rounds; ++i) {
    samples.before.push_back(clock());
    group.barrier("comparison of clocks");
    samples.after.push_back(clock());
  }
  return samples;
}

std::int64_t clock_offset(const ClockSamples& clock, const ClockSamples& reference) {
  const std::size_t rounds = std::min(clock.after.size(), reference.after.size());
  if (rounds == 0) return 0;
  std::int64_t least = std::numeric_limits<std::int64_t>::min();
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 0; i < rounds; ++i) {
    least = std::max(least, clock.before[i] - reference.after[i]);
    most = std::min(most, clock.after[i] - reference.before[i]);
  }
  return least + (most - least) / 2;
}

}  // namespace annulus::launcher
