#pragma once

#include <annulus/attention/implementation.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// The dtype in which a problem's softmax is computed, and so that of its weights: float64 if its
/// softmax dtype or its tensors are float64, else float32.
[[nodiscard]] DType weights_dtype(const AttentionProblem& problem) noexcept;

/// The attention weights [b,n,t,s] of some rows over all the columns of the problem: by what each
/// value is multiplied, after softmax (sinks included) and dropout; 0 where it is hidden. Of
/// `block` the values are not read. `weights` lies on the host, the columns innermost with
/// stride 1. Throws ArgumentError("attention weights", …) for another shape or dtype.
void attention_weights(const AttentionProblem& problem, const AttentionBlock& block,
                       const TensorView& weights, int threads);

}  // namespace annulus
