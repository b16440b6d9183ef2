#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include <annulus/core/place.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/group.hpp>

namespace annulus::launcher {

/// Times of several calls, in seconds.
struct Timing {
  double least = 0;
  double median = 0;
  double p99 = 0;  ///< 99th percentile; of fewer than 100 calls, the longest
  double most = 0;
};

inline Timing timing_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const std::size_t count = seconds.size();
  return {seconds.front(), (seconds[(count - 1) / 2] + seconds[count / 2]) / 2,
          seconds[(count * 99 + 99) / 100 - 1], seconds.back()};
}

/// One call of `body`, begun together: the seconds of the slowest rank. Collective.
template <class Body>
double seconds_of(Control& world, const Body& body) {
  world.barrier();
  const std::int64_t begin = monotonic_ns();
  body();
  const double own = static_cast<double>(monotonic_ns() - begin) * 1e-9;
  return world.max(std::array{own})[0];
}

/// Calls of `body`. Collective.
template <class Body>
Timing time_calls(int iterations, Control& world, const Body& body) {
  std::vector<double> seconds;
  for (int i = 0; i < iterations; ++i) seconds.push_back(seconds_of(world, body));
  return timing_of(std::move(seconds));
}

/// A GPU that has worked for a while runs slower, and rest does not undo all of it. So what is
/// compared begins rested.
class Rest {
 public:
  explicit Rest(Place place) : needed_(!place.is_host()) {}

  /// body(), on a GPU after a rest as long as the last body took, within limits.
  template <class Body>
  auto before(const Body& body) {
    if (needed_) std::this_thread::sleep_for(std::clamp(worked_, {kLeast}, {kMost}));
    const auto begin = std::chrono::steady_clock::now();
    auto result = body();
    worked_ = std::chrono::steady_clock::now() - begin;
    return result;
  }

 private:
  static constexpr std::chrono::milliseconds kLeast{300};
  static constexpr std::chrono::milliseconds kMost{3000};
  bool needed_;
  std::chrono::nanoseconds worked_{0};
};

}  // namespace annulus::launcher
