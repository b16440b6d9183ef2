#include "cuda/score_arguments.hpp"

#include <optional>

#include <annulus/attention/score_tensors.hpp>

namespace annulus::cuda {
namespace {

template <class T>
ScoreArgument<T> score_argument(const std::optional<ConstTensorView>& tensor) {
  if (!tensor) return {};
  return {static_cast<const T*>(tensor->data()),
          {tensor->stride(0), tensor->stride(1), tensor->stride(2), tensor->stride(3)}};
}

}  // namespace

ScoreArguments score_arguments(const ScoreTensors& scores) {
  return {score_argument<float>(scores.bias), score_argument<std::uint8_t>(scores.mask),
          scores.by_column};
}

}  // namespace annulus::cuda
