#include "cuda/h200_rates.hpp"

#include <algorithm>

namespace annulus {
namespace {

// Parts of the rate with a band or without a mask: documents of 4096 tokens, tiles of which a
// quarter are visited, and a soft cap. Shorter documents and sparser tiles are slower.
constexpr double kSegments = 0.90;
constexpr double kBlocks = 0.90;
constexpr double kSoftCap = 0.80;

double rate_of(const H200Rates& kernel, MaskKind mask) {
  switch (mask) {
    case MaskKind::none:
      return kernel.none;
    case MaskKind::band:
      return kernel.band;
    case MaskKind::segments:
      return kSegments * kernel.band;
    case MaskKind::blocks:
      return kBlocks * kernel.none;
    case MaskKind::general:
      return kernel.general;
  }
  return 0;
}

}  // namespace

double h200_rate(std::span<const H200Rates> kernels, const ProblemClass& problem) {
  const auto holds = [&](const H200Rates& kernel) {
    return problem.head_dim <= kernel.head_dim && problem.value_dim <= kernel.value_dim;
  };
  const auto found = std::find_if(kernels.begin(), kernels.end(), holds);
  const H200Rates& kernel = found == kernels.end() ? kernels.back() : *found;
  const double used = static_cast<double>(problem.head_dim + problem.value_dim) /
                      static_cast<double>(kernel.head_dim + kernel.value_dim);
  return rate_of(kernel, problem.mask) * used * (problem.soft_cap ? kSoftCap : 1);
}

}  // namespace annulus
