#pragma once

#include <cmath>
#include <string_view>
#include <vector>

namespace annulus::launcher {

struct TimeUnit {
  std::string_view name;
  double seconds = 1;
};

/// The unit in which this many seconds are a number from 1 to 1000.
[[nodiscard]] inline TimeUnit time_unit(double seconds) {
  if (seconds < 1e-3) return {"µs", 1e-6};
  if (seconds < 1) return {"ms", 1e-3};
  return {"s", 1};
}

/// From 0 to at most `end`, which must be positive: four to ten round numbers at equal distances.
[[nodiscard]] inline std::vector<double> linear_ticks(double end) {
  const double power = std::pow(10, std::floor(std::log10(end)));
  double step = power;
  for (const double part : {0.5, 0.25, 0.2, 0.1}) {
    if (end / step >= 4) break;
    step = power * part;
  }
  std::vector<double> ticks;
  for (int i = 0; i * step <= end * (1 + 1e-9); ++i) ticks.push_back(i * step);
  return ticks;
}

}  // namespace annulus::launcher
