#pragma once

#include <string>

#include <annulus/ring/plan.hpp>

namespace annulus::verification {

/// The backward pass of a case, and how to compute it.
struct BackwardCase {
  std::string implementation = {};  ///< empty: the forward pass's, or "auto"
  std::string schedule = {};        ///< likewise
  ring::BackwardRequest request = {};
  DType grad_wire = DType::float32;  ///< see ring::PlanOptions::grad_wire
  /// True if the case passes when no implementation computes the gradients.
  bool may_be_refused = false;
};

}  // namespace annulus::verification
