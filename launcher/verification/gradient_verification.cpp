#include <algorithm>
#include <cmath>
#include <cstddef>

#include <fmt/format.h>

#include <annulus/verification/gradient_verification.hpp>

namespace annulus::verification {
namespace {

constexpr std::array<const char*, 5> kNames{"query", "key", "value", "sinks", "bias"};

// The larger one; NaN if either is.
double worse(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

}  // namespace

double GradientVerification::share() const {
  double largest = 0;
  for (const double error : sharded) largest = worse(error / bound, largest);
  return largest;
}

std::optional<double> GradientVerification::ratio() const {
  if (!allowance) return {};
  double largest = 0;
  for (std::size_t i = 0; i < sharded.size(); ++i) {
    if (std::isinf((*allowance)[i])) continue;
    const bool same = sharded[i] == unsharded[i];
    largest = worse(same ? 1 : sharded[i] / unsharded[i], largest);
  }
  return largest;
}

std::string GradientVerification::failure() const {
  for (std::size_t i = 0; i < sharded.size(); ++i) {
    if (!(sharded[i] <= bound)) {
      return fmt::format("error of the gradient of {} {:.2e} above {:.2e}", kNames[i], sharded[i],
                         bound);
    }
    if (allowance && !(sharded[i] <= (*allowance)[i])) {
      return fmt::format("error of the gradient of {} {:.2e} against {:.2e} unsharded", kNames[i],
                         sharded[i], unsharded[i]);
    }
  }
  if (!repeats) return "a repeated backward pass gave different bits";
  return reproduces ? "" : "the unsharded backward pass gave different bits";
}

}  // namespace annulus::verification
