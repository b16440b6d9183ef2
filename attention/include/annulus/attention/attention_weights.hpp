#pragma once

#include <annulus/attention/implementation.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// The dtype of a problem's softmax and of its attention weights: float64 if its softmax dtype or
/// its tensors are float64, else float32.
[[nodiscard]] DType weights_dtype(const AttentionProblem& problem) noexcept;

/// Computes the attention weights [b,n,t,s] of some rows over all columns of the problem. They are
/// the factors of the values: after softmax (sinks included) and dropout, and 0 where a key is
/// hidden. `block.value` is not read. `weights` is in host memory, with columns innermost and
/// stride 1. Each thread also holds the keys of one head, in the dtype of the weights, and some
/// rows of weights, about 10 MiB. Throws ArgumentError("attention weights", …) for another shape or
/// dtype.
void attention_weights(const AttentionProblem& problem, const AttentionBlock& block,
                       const TensorView& weights, int threads);

}  // namespace annulus
