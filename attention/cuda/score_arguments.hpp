#pragma once

#include <cstdint>

#include <annulus/attention/score_tensors.hpp>

namespace annulus::cuda {

/// A bias or dense mask [b,n,t,S] for device code: see annulus::ScoreTensors. Strides count
/// elements and are 0 in broadcast dimensions. Batch, head and row are local indices; the column is
/// a global position.
template <class T>
struct ScoreArgument {
  const T* data;  ///< device memory; null: none
  std::int64_t strides[4];

#ifdef __CUDACC__
  /// Where the columns of a row begin: column j is at j · strides[3].
  [[nodiscard]] __device__ __forceinline__ const T* row(std::int64_t b, std::int64_t head,
                                                        std::int64_t row) const {
    return data + b * strides[0] + head * strides[1] + row * strides[2];
  }
#endif
};

/// Bias and dense mask of a call. A pair is hidden where the mask is 0 or the bias is −∞.
struct ScoreArguments {
  ScoreArgument<float> bias;
  ScoreArgument<std::uint8_t> mask;
};

template <class T>
[[nodiscard]] ScoreArgument<T> score_argument(const std::optional<ConstTensorView>& tensor) {
  if (!tensor) return {};
  return {static_cast<const T*>(tensor->data()),
          {tensor->stride(0), tensor->stride(1), tensor->stride(2), tensor->stride(3)}};
}

/// The same views, for device code.
[[nodiscard]] inline ScoreArguments score_arguments(const ScoreTensors& scores) {
  return {score_argument<float>(scores.bias), score_argument<std::uint8_t>(scores.mask)};
}

}  // namespace annulus::cuda
