#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/call_argument_write.hpp>

namespace annulus::ring {

/// The runner's elementwise operations around the kernels, on one kind of memory. Every call is
/// ordered by its stream.
class LocalOperations {
 public:
  virtual ~LocalOperations() = default;
  /// See softmax_state.hpp.
  virtual void combine(std::span<const PartialState> parts, const SoftmaxState& result,
                       SoftmaxForm form, Stream& stream) const = 0;
  /// result := the sum of the parts, in their order, added in float32 (float64 for a float64
  /// result) and rounded once; 0 without parts. All have one shape, stride 1 in the last dimension,
  /// and floating dtypes; all are float64 or none is. One of the parts may be the result's memory.
  /// At most kMaximumParts.
  virtual void sum(std::span<const ConstTensorView> parts, const TensorView& result,
                   Stream& stream) const = 0;
  /// delta := rowsum(output ∘ grad_output) − grad_lse: outputs [b,t,n,Dv], delta and grad_lse
  /// [b,n,t]; grad_lse may be without dimensions. Delta is float32, or float64 if the outputs are.
  /// The sum of a row whose output is 0 is 0 even if its grad_output is NaN, as in padding.
  virtual void delta(const ConstTensorView& output, const ConstTensorView& grad_output,
                     const ConstTensorView& grad_lse, const TensorView& delta,
                     Stream& stream) const = 0;
  /// grad_sinks[0,0,n,m] := −Σ exp(sinks[n,m] − lse[b,n,t]) · delta[b,n,t] over batches and rows
  /// whose LSE is not −∞, in an order that depends on sizes alone. LSE and delta are as for
  /// delta(); sinks [n,M] and grad_sinks [1,1,n,M] are float32. Both have one head where heads
  /// share their sinks: the sum is then also over heads. In host memory, grad_sinks may be float64
  /// [1,13,n,M]: the parts of a sum whose bits depend on no order (exact_sum.hpp).
  virtual void sink_gradient(const ConstTensorView& sinks, const ConstTensorView& lse,
                             const ConstTensorView& delta, const TensorView& grad_sinks,
                             Stream& stream) const = 0;
  /// The softmax state of sinks [n,M], or [M] for all heads alike; float32, stride 1 in the last
  /// dimension. Copies them to `logits`, contiguous. Sets lse [n] (float32 or float64) to the log
  /// of the sum of a head's exponentials, and maximum [n] (float32) unless it has no dimensions.
  virtual void sink_state(const ConstTensorView& sinks, const TensorView& logits,
                          const TensorView& lse, const TensorView& maximum,
                          Stream& stream) const = 0;
  /// Writes a number that running kernels read (AttentionBlock::arrived_from). A kernel that reads
  /// the new value also sees the stream's earlier writes.
  virtual void publish(std::int32_t value, std::int32_t* number, Stream& stream) const = 0;
  /// Writes arguments of a call to where later kernels read them. Arguments in device memory are
  /// read in the order of the stream.
  virtual void write(const CallArgumentWrite& write, Stream& stream) const = 0;
};

/// For tensors at `place`. Throws UnsupportedError for a place that this build cannot serve.
[[nodiscard]] std::unique_ptr<LocalOperations> make_local_operations(Place place);

}  // namespace annulus::ring
