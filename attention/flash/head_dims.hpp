#pragma once

#include <annulus/attention/problem.hpp>

namespace annulus::flash {

/// The largest head dimensions that a kernel of half types takes. CMakeLists.txt compiles a kernel
/// for each pair below.
template <int kHeadDim_, int kValueDim_>
struct HeadDims {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
};

/// Calls use(HeadDims) with the smallest pair that holds the dimensions of the shape.
template <class Use>
auto with_head_dims(const AttentionShape& shape, const Use& use) {
  if (shape.head_dim <= 64 && shape.value_dim <= 64) return use(HeadDims<64, 64>());
  if (shape.head_dim <= 128 && shape.value_dim <= 128) return use(HeadDims<128, 128>());
  if (shape.head_dim <= 192 && shape.value_dim <= 128) return use(HeadDims<192, 128>());
  return use(HeadDims<256, 256>());
}

}  // namespace annulus::flash
