#pragma once

#include <annulus/attention/problem.hpp>

namespace annulus::flash {

/// The largest head dimensions of a kernel of half types. CMakeLists.txt compiles one for each of
/// those below.
template <int kHeadDim_, int kValueDim_>
struct HeadDims {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
};

/// Calls use(HeadDims) with the smallest ones that hold those of the shape.
template <class Use>
auto with_head_dims(const AttentionShape& shape, const Use& use) {
  if (shape.head_dim <= 64 && shape.value_dim <= 64) return use(HeadDims<64, 64>());
  if (shape.head_dim <= 128 && shape.value_dim <= 128) return use(HeadDims<128, 128>());
  if (shape.head_dim <= 192 && shape.value_dim <= 128) return use(HeadDims<192, 128>());
  return use(HeadDims<256, 256>());
}

}  // namespace annulus::flash
