#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flash/kernels.hpp"

namespace annulus::flash {

/// Tiles and threads of the kernel for head dimensions up to kHeadDim_ and kValueDim_ (multiples of
/// 64; smaller ones are padded with zeros by the copies). One warpgroup loads keys and values, the
/// others compute 64 rows each.
template <class Element_, int kHeadDim_, int kValueDim_, int kConsumers_, int kColumns_,
          bool kSkipsFactors_ = false>
struct Shape {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kConsumers = kConsumers_;  ///< warpgroups that compute
  static constexpr int kRows = 64 * kConsumers;   ///< of a query tile
  static constexpr int kColumns = kColumns_;      ///< of a key tile
  /// True if multiplying the output by factors of 1 is skipped: worth a test for wide values.
  static constexpr bool kSkipsFactors = kSkipsFactors_;
  static constexpr int kStages = 2;  ///< tiles of keys, and of values, in shared memory
  /// Tiles of queries; two where they fit, so that the next one arrives early.
  static constexpr int kQueryStages = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kWatchers = 2;  ///< warps that look for hidden values that are not finite
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
};

/// The shape for head dimensions up to kHeadDim and kValueDim. Three warpgroups of 64 rows where
/// registers and shared memory suffice: S, P and O of a thread take 64, 32 and half the value
/// dimension.
template <class Element, int kHeadDim, int kValueDim, MaskClass kMask>
struct ShapeOf {
  using Type = Shape<Element, kHeadDim, kValueDim, kValueDim <= 64 ? 3 : 2,
                     kValueDim <= 128 ? 128 : 80, (kValueDim > 128)>;
};
/// The general class needs registers for bias, mask and dropout too.
template <class Element, int kHeadDim, int kValueDim>
struct ShapeOf<Element, kHeadDim, kValueDim, MaskClass::general> {
  using Type = Shape<Element, kHeadDim, kValueDim, 2,
                     kHeadDim <= 128    ? 128
                     : kValueDim <= 128 ? 80
                                        : 64,
                     (kValueDim > 128)>;
};
template <class Element, int kHeadDim, int kValueDim, MaskClass kMask>
using ShapeFor = typename ShapeOf<Element, kHeadDim, kValueDim, kMask>::Type;

}  // namespace annulus::flash
