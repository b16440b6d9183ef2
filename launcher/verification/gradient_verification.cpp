#include <cmath>
#include <cstddef>

#include <fmt/format.h>

#include <annulus/verification/gradient_verification.hpp>

#include "entries.hpp"

namespace annulus::verification {
namespace {

constexpr std::array<const char*, 5> kNames{"query", "key", "value", "sinks", "bias"};

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

std::vector<Failure> GradientVerification::failures() const {
  std::vector<Failure> all;
  for (std::size_t i = 0; i < sharded.size() && all.empty(); ++i) {
    if (!(sharded[i] <= bound)) {
      all.push_back(
          {Failure::Kind::bound, fmt::format("error of the gradient of {} {:.2e} above {:.2e}",
                                             kNames[i], sharded[i], bound)});
    } else if (allowance && !(sharded[i] <= (*allowance)[i])) {
      all.push_back({Failure::Kind::ratio,
                     fmt::format("error of the gradient of {} {:.2e} against {:.2e} unsharded",
                                 kNames[i], sharded[i], unsharded[i])});
    }
  }
  add_differing_bits(all, "backward pass");
  return all;
}

}  // namespace annulus::verification
