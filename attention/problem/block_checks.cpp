#include "problem/block_checks.hpp"

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus {

void BlockChecks::require(bool fits, const char* what) const {
  if (!fits) throw InternalError(fmt::format("{}: {}", who_, what));
}

void BlockChecks::require_unit_strides(std::initializer_list<ConstTensorView> tensors) const {
  for (const ConstTensorView& tensor : tensors) {
    require(tensor.size(3) == 1 || tensor.stride(3) == 1, "the head dimension is strided");
  }
}

void BlockChecks::require(bool fits, const char* name, const ConstTensorView& tensor) const {
  if (fits) return;
  throw InternalError(fmt::format("{}: {}, {} {}, does not fit", who_, name,
                                  name_of(tensor.dtype()), to_string(tensor.shape())));
}

void BlockChecks::check_operands(const AttentionBlock& block) const {
  const Extents& query = block.query.shape();
  const Extents& key = block.key.shape();
  const Extents& value = block.value.shape();
  const DType dtype = problem_.dtype;
  require(query.rank() == 4 && block.query.dtype() == dtype, "query", block.query);
  require(key.rank() == 4 && key == Extents{query[0], key[1], key[2], query[3]} &&
              block.key.dtype() == dtype,
          "key", block.key);
  require(value.rank() == 4 && value == Extents{key[0], key[1], key[2], value[3]} &&
              block.value.dtype() == dtype,
          "value", block.value);
  require(key[2] > 0 && query[2] % key[2] == 0,
          "query heads are not a multiple of key/value heads");
  require(block.rows.size() == query[1], "row positions do not fit query");
  require(block.columns.size() == key[1], "column positions do not fit key");
  block.scores.check(problem_, query, block.columns.size());
}

void BlockChecks::check(const AttentionBlock& block, const SoftmaxState& result) const {
  check_operands(block);
  const Extents& query = block.query.shape();
  const auto& [output, lse, maximum] = result;
  require(output.shape() == Extents{query[0], query[1], query[2], block.value.size(3)} &&
              (output.dtype() == DType::float32 || output.dtype() == problem_.dtype),
          "output", output);
  require(lse.shape() == Extents{query[0], query[2], query[1]} &&
              (lse.dtype() == DType::float32 || lse.dtype() == DType::float64),
          "LSE", lse);
  require(!result.wants_maximum() ||
              (maximum.shape() == lse.shape() && maximum.dtype() == DType::float32),
          "maximum", maximum);
  if (!block.state) return;
  require(block.state->output.shape() == output.shape() &&
              block.state->output.dtype() == DType::float32,
          "output of the state", block.state->output);
  require(block.state->lse.shape() == lse.shape(), "LSE of the state", block.state->lse);
}

void BlockChecks::check(const BackwardBlock& block, const Gradients& gradients) const {
  check_operands(forward_of(block));
  const Extents& query = block.query.shape();
  const Extents outputs{query[0], query[1], query[2], block.value.size(3)};
  require(block.grad_output.shape() == outputs && block.grad_output.dtype() == problem_.dtype,
          "gradient of the output", block.grad_output);
  const auto check_float32 = [&](const char* name, const ConstTensorView& tensor,
                                 const Extents& shape) {
    require(tensor.shape() == shape && tensor.dtype() == DType::float32, name, tensor);
  };
  const Extents rows{query[0], query[2], query[1]};
  check_float32("LSE", block.lse, rows);
  check_float32("delta", block.delta, rows);
  const auto check_gradient = [&](const char* name, const TensorView& gradient,
                                  const ConstTensorView& tensor) {
    if (gradient.rank() > 0) check_float32(name, gradient, tensor.shape());
  };
  check_gradient("gradient of query", gradients.query, block.query);
  check_gradient("gradient of key", gradients.key, block.key);
  check_gradient("gradient of value", gradients.value, block.value);
  if (gradients.bias.rank() == 0) return;
  require(block.scores.bias.has_value(), "a gradient of the bias is wanted, but there is no bias");
  check_gradient("gradient of bias", gradients.bias, *block.scores.bias);
}

}  // namespace annulus
