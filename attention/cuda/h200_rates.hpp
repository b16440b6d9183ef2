#pragma once

#include <cstdint>
#include <span>

#include <annulus/attention/problem_class.hpp>

namespace annulus {

/// Rates of an H200 in one pass on long sequences, in operations per second, for head dimensions that
/// have a kernel of their own (benchmarks/NOTES.md, "Beside cuDNN" and "the general class").
struct H200Rates {
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  double none = 0;        ///< by MaskKind
  double band = 0;        ///< likewise
  double general = 1e12;  ///< likewise; of no meaning where no kernel takes such problems
};

/// The share of a rested GPU's rate that long runs keep, in which the power limit holds it.
inline constexpr double kInLongRuns = 0.86;

/// The rate that plans assume of a class. `kernels` in ascending order of head dimensions, the last
/// of which hold every class: others are computed by the next larger kernel, padded.
[[nodiscard]] double h200_rate(std::span<const H200Rates> kernels, const ProblemClass& problem);

}  // namespace annulus
