#pragma once

#include <cstdint>

// Kernels that take long to compile include this, and should not be compiled anew whenever a
// problem changes.
namespace annulus {
struct ScoreTensors;
}  // namespace annulus

namespace annulus::cuda {

/// A bias or dense mask [b,n,t,S] for device code: see annulus::ScoreTensors. Strides count
/// elements and are 0 in broadcast dimensions. All indices but the key are local.
template <class T>
struct ScoreArgument {
  const T* data;  ///< device memory; null: none
  std::int64_t strides[4];

#ifdef __CUDACC__
  /// The address of a row's first key; key j is at j · strides[3] from there.
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
  bool by_column;  ///< keys are the columns of the call, rather than all by global position

#ifdef __CUDACC__
  [[nodiscard]] __device__ __forceinline__ std::int64_t key_of(std::int64_t column,
                                                               std::int64_t position) const {
    return by_column ? column : position;
  }
#endif
};

/// The same views, for device code.
[[nodiscard]] ScoreArguments score_arguments(const ScoreTensors& scores);

}  // namespace annulus::cuda
