#pragma once

#include <annulus/attention/problem.hpp>
#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// The sinks of a rank's heads, in the memory of its device, as the part that a reduction adds.
class SinkStates {
 public:
  /// Returns when the copies are done. Holds nothing if the problem has no sinks.
  SinkStates(const AttentionProblem& problem, const RankPlan& plan, Device& device, Stream& stream);

  /// The sinks of `heads`, counted from the rank's first, for every row of a result of this shape:
  /// output 0, their LSE and, where such are wanted, the largest of them. `dtype` only says as what
  /// the zeros are read.
  [[nodiscard]] PartialState part(HeadRange heads, const Extents& output, DType dtype) const;
  /// The sinks of all heads, [n,M], or [1,M] where heads share them; for plans that want their
  /// gradient.
  [[nodiscard]] ConstTensorView logits() const { return logits_.view(); }

 private:
  Tensor zeros_;    // [Dv], as wide as partial results
  Tensor lse_;      // [n]
  Tensor logits_;   // float32; of rank 0 where no gradient is wanted
  Tensor maximum_;  // [n], float32; of rank 0 where the output is normalised
};

}  // namespace annulus::ring
