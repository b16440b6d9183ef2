#pragma once

#include <cstdint>
#include <optional>

#include <annulus/core/tensor.hpp>

namespace annulus::ring {

/// Values of one call, for what AttentionProblem::call_arguments names. Where a view has no
/// dimensions, or there is no seed, the values of the problem and of set_mask() hold. Views are
/// int32, with one number for all batches of the rank, [1], or one for each batch, [b]. Host values
/// are read before the call returns. Values in the memory of the computing device are read when the
/// call runs, in the order of the caller's stream: a length out of bounds then counts as the
/// nearest one within, and the next wait() throws. Ranks that hold the same batches must pass the
/// same values.
struct CallValues {
  ConstTensorView query_lengths = {};  ///< from 0 to the lengths of the problem's mask, or to T
  ConstTensorView kv_lengths = {};     ///< likewise, or S
  ConstTensorView offsets = {};        ///< of the diagonal: see Mask::set_offsets()
  std::optional<std::uint64_t> dropout_seed = {};
  const std::uint64_t* device_dropout_seed = nullptr;  ///< the seed, in the device's memory
  /// Sinks that replace the problem's; call_arguments need not name them. [n,M] for the rank's
  /// heads, or [M] if heads share the problem's sinks; float32, stride 1 in the last dimension,
  /// below +∞, in the device's memory. Read in the order of the caller's stream.
  ConstTensorView sinks = {};

  bool operator==(const CallValues&) const = default;
};

/// Local shards of one call, where the device computes. Head dimensions are innermost with stride
/// 1; other strides are free, but decide which kernels can run: kernels for half types on GPUs need
/// strides and addresses that are multiples of 16 bytes.
struct LocalTensors {
  ConstTensorView query;  ///< [b,t,n,D]
  ConstTensorView key;    ///< [b,s,k,D]
  ConstTensorView value;  ///< [b,s,k,Dv]
  TensorView output;      ///< [b,t,n,Dv], the problem's dtype
  TensorView lse;         ///< [b,n,t], float32; none with an unnormalised output
  /// The rank's rows of bias (float32) and dense mask (boolean), if the problem has them:
  /// [b,n,t,S], with 1 where they are broadcast; the last dimension has stride 1.
  ConstTensorView bias = {};
  ConstTensorView mask = {};
  /// Results of an unnormalised call, in place of an LSE: the largest logits and the sums of the
  /// exponentials relative to them, [b,n,t], float32.
  TensorView maximum = {};
  TensorView sum = {};
  /// [b,n,t,S], contiguous, of annulus::weights_dtype(): if the problem asks for attention weights.
  TensorView weights = {};
  CallValues call_values = {};

  bool operator==(const LocalTensors&) const = default;
};

/// Local shards of one call of the backward pass, likewise.
struct BackwardLocalTensors {
  ConstTensorView query;          ///< as in the forward pass, as are the next two
  ConstTensorView key;            ///< [b,s,k,D]
  ConstTensorView value;          ///< [b,s,k,Dv]
  ConstTensorView output;         ///< [b,t,n,Dv]: a result of the forward pass, as is the LSE
  ConstTensorView lse;            ///< [b,n,t], float32
  ConstTensorView grad_output;    ///< [b,t,n,Dv], the problem's dtype
  TensorView grad_query;          ///< [b,t,n,D], the problem's dtype, as are the next two
  TensorView grad_key;            ///< [b,s,k,D]
  TensorView grad_value;          ///< [b,s,k,Dv]
  ConstTensorView bias = {};      ///< as in the forward pass
  ConstTensorView mask = {};      ///< likewise
  ConstTensorView grad_lse = {};  ///< [b,n,t], float32; without dimensions: 0
  CallValues call_values = {};    ///< as in the forward pass
  /// [n,M] for the rank's heads, or [M] where all heads share the sinks; float32, stride 1 in the
  /// last dimension. Without dimensions: not wanted. All ranks want it, or none does.
  TensorView grad_sinks = {};
  /// [b,n,t,S], of the shape of `bias`; float32, stride 1 in the last dimension. Without
  /// dimensions: not wanted. All ranks want it, or none does.
  TensorView grad_bias = {};

  bool operator==(const BackwardLocalTensors&) const = default;
};

}  // namespace annulus::ring
