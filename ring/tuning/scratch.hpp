#pragma once

#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus::ring {

/// Tensors of a rank's shapes, in device memory, to time calls with. Queries, keys and values are
/// random numbers between −1 and 1, a bias is 0 and a dense mask hides nothing.
class ScratchTensors {
 public:
  /// `device` must outlive it. Throws LibraryError if there is no memory.
  ScratchTensors(const AttentionProblem& problem, const ShardedOperands& operands, int rank,
                 Device& device, const Watchdog& watchdog);

  [[nodiscard]] const LocalTensors& tensors() const noexcept { return tensors_; }

 private:
  Tensor query_, key_, value_, output_;
  Tensor lse_, maximum_, sum_;
  Tensor bias_, mask_;
  LocalTensors tensors_;
};

}  // namespace annulus::ring
