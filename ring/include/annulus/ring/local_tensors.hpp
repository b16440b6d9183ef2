#pragma once

#include <annulus/core/tensor.hpp>

namespace annulus::ring {

/// Local shards of one call, where the device computes. Head dimensions are innermost with stride
/// 1; other strides are free, but decide which kernels can run: those for half types on GPUs need
/// strides and addresses that are multiples of 16 bytes.
struct LocalTensors {
  ConstTensorView query;  ///< [b,t,n,D]
  ConstTensorView key;    ///< [b,s,k,D]
  ConstTensorView value;  ///< [b,s,k,Dv]
  TensorView output;      ///< [b,t,n,Dv], the problem's dtype
  TensorView lse;         ///< [b,n,t], float32; none of an unnormalised output
  /// The rank's rows of bias (float32) and dense mask (boolean), if the problem has them:
  /// [b,n,t,S], with 1 where they are broadcast; the last dimension has stride 1.
  ConstTensorView bias = {};
  ConstTensorView mask = {};
  /// Of an unnormalised output, in place of an LSE: the largest logits and the sums of the
  /// exponentials relative to them, [b,n,t], float32.
  TensorView maximum = {};
  TensorView sum = {};
  /// [b,n,t,S], contiguous, of annulus::weights_dtype(): if the problem asks for attention weights.
  TensorView weights = {};

  bool operator==(const LocalTensors&) const = default;
};

}  // namespace annulus::ring
