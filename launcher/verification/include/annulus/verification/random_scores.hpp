#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/verification/operand_fills.hpp>

namespace annulus::verification {

/// A bias of normal numbers of this standard deviation. As with fill_random(), an entry depends
/// only on the seed and its place in `shape`.
[[nodiscard]] FillPart random_bias(const Extents& shape, double deviation, std::uint64_t seed,
                                   int threads = 1);
/// Pairs that are visible with probability `density`; entries depend on seed and place as above.
/// Throws ArgumentError("density", …) unless it is from 0 to 1.
[[nodiscard]] FillPart random_mask(const Extents& shape, double density, std::uint64_t seed);

/// The bias of `fills`, with NaN or ±∞ in entries whose pairs are all hidden by `problem.mask` or
/// the mask of `fills`, so that they must affect no row. For small problems.
[[nodiscard]] FillPart non_finite_bias(const AttentionProblem& problem, OperandFills fills);
/// `bias` with −∞ where `mask`, of the same shape, is 0.
[[nodiscard]] FillPart hiding_bias(FillPart bias, FillPart mask);

}  // namespace annulus::verification
