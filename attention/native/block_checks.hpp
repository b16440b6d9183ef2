#pragma once

#include <string>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/error.hpp>

// Checks of blocks that only a defect of the caller fails, forward and backward.
namespace annulus {

inline void check(bool fits, const char* what) {
  if (!fits) throw InternalError(std::string("native attention: ") + what);
}

[[nodiscard]] inline bool has_unit_stride(const ConstTensorView& tensor) {
  return tensor.size(3) == 1 || tensor.stride(3) == 1;
}

/// Checks shapes and strides of query, key, value, positions and scores against each other.
inline void check_operands(const AttentionProblem& problem, const AttentionBlock& block) {
  const Extents& query = block.query.shape();
  const Extents& key = block.key.shape();
  const Extents& value = block.value.shape();
  check(query.rank() == 4 && key.rank() == 4 && value.rank() == 4, "tensors must have rank 4");
  check(key == Extents{query[0], key[1], key[2], query[3]}, "key does not fit query");
  check(value == Extents{key[0], key[1], key[2], value[3]}, "value does not fit key");
  check(key[2] > 0 && query[2] % key[2] == 0, "query heads are not a multiple of key/value heads");
  check(block.rows.size() == query[1], "row positions do not fit query");
  check(block.columns.size() == key[1], "column positions do not fit key");
  for (const ConstTensorView* tensor : {&block.query, &block.key, &block.value}) {
    check(has_unit_stride(*tensor), "head dimension has a stride");
  }
  block.scores.check(problem, query, block.columns.size());
}

/// Checks a block of the forward pass and its result.
inline void check_forward(const AttentionProblem& problem, const AttentionBlock& block,
                          const SoftmaxState& result) {
  check_operands(problem, block);
  const Extents& query = block.query.shape();
  const Extents& value = block.value.shape();
  check(result.output.shape() == Extents{query[0], query[1], query[2], value[3]} &&
            result.lse.shape() == Extents{query[0], query[2], query[1]},
        "result does not fit");
  check(result.output.dtype() == DType::float32, "output is not float32");
  check(result.lse.dtype() == DType::float32 || result.lse.dtype() == DType::float64,
        "LSE is neither float32 nor float64");
  check(!result.wants_maximum() || (result.maximum.shape() == result.lse.shape() &&
                                    result.maximum.dtype() == DType::float32),
        "maximum does not fit");
  check(has_unit_stride(result.output), "head dimension has a stride");
}

/// Checks a block of the backward pass and its gradients.
inline void check_gradients(const AttentionProblem& problem, const BackwardBlock& block,
                            const Gradients& gradients) {
  check_operands(problem, forward_of(block));
  const Extents& query = block.query.shape();
  const Extents& key = block.key.shape();
  const Extents& value = block.value.shape();
  check(block.grad_output.shape() == Extents{query[0], query[1], query[2], value[3]} &&
            block.grad_output.dtype() == block.query.dtype() && has_unit_stride(block.grad_output),
        "gradient of the output does not fit");
  const Extents rows{query[0], query[2], query[1]};
  check(block.lse.shape() == rows && block.delta.shape() == rows, "LSE or delta does not fit");
  check(block.lse.dtype() == DType::float32 && block.delta.dtype() == DType::float32,
        "LSE or delta is not float32");
  const auto check_gradient = [&](const TensorView& gradient, const Extents& shape) {
    if (gradient.shape().rank() == 0) return;
    check(gradient.shape() == shape && gradient.dtype() == DType::float32,
          "gradient does not fit its tensor, or is not float32");
  };
  check_gradient(gradients.query, query);
  check_gradient(gradients.key, key);
  check_gradient(gradients.value, value);
  if (gradients.bias.shape().rank() > 0) {
    check(block.scores.bias.has_value(), "there is no bias to have a gradient");
    check_gradient(gradients.bias, block.scores.bias->shape());
  }
}

}  // namespace annulus
