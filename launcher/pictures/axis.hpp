#pragma once

#include <cmath>
#include <string_view>
#include <vector>

namespace annulus::launcher {

struct TimeUnit {
  std::string_view name;
  double seconds = 1;
};

/// The unit in which this time is a number from 1 to 1000.
[[nodiscard]] inline TimeUnit time_unit(double seconds) {
  if (seconds < 1e-3) return {"µs", 1e-6};
  if (seconds < 1) return {"ms", 1e-3};
  return {"s", 1};
}

/// Four to ten round numbers at equal distances, from 0 to at most `end`; none unless `end` is a
/// positive, normal number.
[[nodiscard]] inline std::vector<double> linear_ticks(double end) {
  if (end <= 0 || !std::isnormal(end)) return {};
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

/// 1, 10, 100, … or, if that gives few ticks, 1, 2, 5, 10, …, from `least` to `most`; none unless
/// both are positive and finite.
[[nodiscard]] inline std::vector<double> logarithmic_ticks(double least, double most) {
  if (!(least > 0) || !(most >= least) || std::isinf(most)) return {};
  std::vector<double> ticks;
  const bool few = most / least < 100;
  int exponent = static_cast<int>(std::floor(std::log10(least)));
  for (double power = std::pow(10, exponent); power <= most; power = std::pow(10, ++exponent)) {
    for (const double part : {1.0, 2.0, 5.0}) {
      if (part > 1 && !few) continue;
      const double tick = power * part;
      if (tick >= least * (1 - 1e-9) && tick <= most * (1 + 1e-9)) ticks.push_back(tick);
    }
  }
  return ticks;
}

}  // namespace annulus::launcher
