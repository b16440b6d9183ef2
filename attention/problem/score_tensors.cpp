#include <string>

#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/error.hpp>

namespace annulus {

ScoreTensors ScoreTensors::slice(int dim, std::int64_t begin, std::int64_t count) const {
  ScoreTensors part{.by_column = by_column};
  if (bias) part.bias = bias->slice(dim, begin, count);
  if (mask) part.mask = mask->slice(dim, begin, count);
  return part;
}

void ScoreTensors::check(const AttentionProblem& problem, const Extents& query,
                         std::int64_t columns) const {
  const Extents shape{query[0], query[2], query[1], by_column ? columns : problem.shape.kv_length};
  const auto one = [&](const char* name, const std::optional<ConstTensorView>& tensor, bool wanted,
                       DType dtype) {
    if (!tensor && !wanted) return;
    if (tensor.has_value() != wanted) {
      throw InternalError(std::string(name) + (wanted ? " is missing" : " is not expected"));
    }
    if (tensor->shape() != shape || tensor->dtype() != dtype ||
        (tensor->size(3) > 1 && tensor->stride(3) > 1)) {
      throw InternalError(std::string(name) + " of " + std::string(name_of(tensor->dtype())) + " " +
                          to_string(tensor->shape()) + ", expected " + std::string(name_of(dtype)) +
                          " " + to_string(shape));
    }
  };
  one("bias", bias, problem.bias.has_value(), DType::float32);
  one("dense mask", mask, problem.dense_mask.has_value(), DType::boolean);
}

ConstTensorView broadcast_to(const ConstTensorView& tensor, const Extents& shape) {
  Extents strides = tensor.strides();
  for (int dim = 0; dim < shape.rank(); ++dim) {
    if (tensor.size(dim) == 1) strides[dim] = 0;
  }
  return {tensor.data(), tensor.dtype(), shape, strides, tensor.place()};
}

ScoreTensors broadcast_scores(const ConstTensorView& bias, const ConstTensorView& mask,
                              const Extents& shape) {
  ScoreTensors scores;
  if (bias.rank() > 0) scores.bias = broadcast_to(bias, shape);
  if (mask.rank() > 0) scores.mask = broadcast_to(mask, shape);
  return scores;
}

}  // namespace annulus
