#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include <annulus/core/place.hpp>
#include <annulus/mesh/timing.hpp>

namespace annulus::launcher {

/// A GPU that has worked for a while runs slower, and rest does not undo all of it. So all series
/// that are compared begin after a rest.
class Rest {
 public:
  explicit Rest(Place place) : needed_(!place.is_host()) {}

  /// Runs body(); on a GPU, first rests as long as the last body took, within limits.
  template <class Body>
  auto before(const Body& body) {
    if (needed_) std::this_thread::sleep_for(std::clamp(worked_, {kLeast}, {kMaximum}));
    const auto begin = std::chrono::steady_clock::now();
    auto result = body();
    worked_ = std::chrono::steady_clock::now() - begin;
    return result;
  }

 private:
  static constexpr std::chrono::milliseconds kLeast{300};
  static constexpr std::chrono::milliseconds kMaximum{3000};
  bool needed_;
  std::chrono::nanoseconds worked_{0};
};

}  // namespace annulus::launcher
