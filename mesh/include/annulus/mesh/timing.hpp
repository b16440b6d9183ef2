#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <annulus/core/trace.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus {

/// Times of several calls, in seconds.
struct Timing {
  double least = 0;
  double median = 0;
  double p99 = 0;  ///< 99th percentile; of fewer than 100 calls, the longest
  double most = 0;
};

/// Statistics of one or more times.
inline Timing timing_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const std::size_t count = seconds.size();
  return {seconds.front(), (seconds[(count - 1) / 2] + seconds[count / 2]) / 2,
          seconds[(count * 99 + 99) / 100 - 1], seconds.back()};
}

/// Times one call of `body`, which all ranks begin together: the seconds of the slowest rank.
/// `body` must return when the device is done. Collective.
template <class Body>
double seconds_of(Control& world, const Body& body) {
  world.barrier("start of a timed call");
  const std::int64_t begin = monotonic_ns();
  body();
  const double own = static_cast<double>(monotonic_ns() - begin) * 1e-9;
  return world.max(std::array{own}, "time of a call")[0];
}

/// Times several calls of `body`. Collective.
template <class Body>
Timing time_calls(int iterations, Control& world, const Body& body) {
  std::vector<double> seconds;
  for (int i = 0; i < iterations; ++i) seconds.push_back(seconds_of(world, body));
  return timing_of(std::move(seconds));
}

}  // namespace annulus
