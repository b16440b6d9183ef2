#pragma once

#include <span>

#include <annulus/core/tensor.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Checks the caller's tensors of one call against the plan. Throws ArgumentError, naming the
/// tensor and what was expected, for another shape, dtype or place, a null pointer, a last
/// dimension whose stride is not 1, and results whose elements share memory. Throws InternalError
/// for another number of tensors.
void check_tensors(const RankPlan& plan, std::span<const TensorView> expected,
                   std::span<const TensorView> tensors);

/// True if kernels can treat both alike: strides and alignment are the same.
[[nodiscard]] bool lie_alike(const TensorView& a, const TensorView& b);

}  // namespace annulus::ring
