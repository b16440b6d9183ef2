#pragma once

#include <annulus/attention/problem.hpp>
#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// The sinks of a rank's heads in device memory, in the form that a reduction adds. Their addresses
/// never change, so recorded calls serve all values.
class SinkStates {
 public:
  /// The problem must have sinks. Returns when the copies are done.
  SinkStates(const AttentionProblem& problem, const RankPlan& plan, Device& device,
             const LocalOperations& operations, Stream& stream);

  /// Sets the sinks of later calls, in the order of the stream: `sinks` [n,M] or [M] in the memory
  /// of the device, or the problem's sinks if it has no dimensions. The latter are written again
  /// only where the call is captured into a graph, which others may have changed before it is
  /// launched, or others have been set, or may be by a graph.
  void set(const ConstTensorView& sinks, bool captured, const LocalOperations& operations,
           Stream& stream);

  /// The sinks of `heads`, counted from the rank's first, for every row of a result of this shape:
  /// output 0, their LSE and, if wanted, their maximum. `dtype` is the type that the zeros are read
  /// as.
  [[nodiscard]] PartialState part(HeadRange heads, const Extents& output, DType dtype) const;
  /// The sinks of all heads, [n,M], or [1,M] where heads share them.
  [[nodiscard]] ConstTensorView logits() const { return logits_.view(); }

 private:
  Tensor zeros_;  // [Dv], as wide as partial results
  Tensor own_;    // the problem's sinks, as logits_
  bool holds_own_ = true;
  bool graphs_write_others_ = false;
  Tensor logits_;   // float32
  Tensor lse_;      // [n]
  Tensor maximum_;  // [n], float32; without dimensions if the output is normalised
};

}  // namespace annulus::ring
