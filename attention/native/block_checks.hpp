#pragma once

#include "problem/block_checks.hpp"

namespace annulus {

/// Checks a block of the forward pass and its result.
inline void check_forward(const AttentionProblem& problem, const AttentionBlock& block,
                          const SoftmaxState& result) {
  const BlockChecks checks("native attention", problem);
  checks.check(block, result);
  checks.require(result.output.dtype() == DType::float32, "output is not float32");
  checks.require_unit_strides({block.query, block.key, block.value, result.output});
}

/// Checks a block of the backward pass and its gradients.
inline void check_gradients(const AttentionProblem& problem, const BackwardBlock& block,
                            const Gradients& gradients) {
  const BlockChecks checks("native attention", problem);
  checks.check(block, gradients);
  checks.require_unit_strides({block.query, block.key, block.value, block.grad_output});
}

}  // namespace annulus
