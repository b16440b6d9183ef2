#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/verification/device_twin.hpp>
#include <annulus/verification/gradient_verification.hpp>
#include <annulus/verification/verification.hpp>

namespace annulus::verification {

/// What one rank holds of the backward pass of a case: random gradients of the results, and the
/// gradients to be computed.
class GradientShards {
 public:
  /// `sharded_case` has a backward pass. Collective over the context, which must outlive it.
  GradientShards(const ShardedCase& sharded_case, const ring::ShardedOperands& operands,
                 Context& context);

  /// Computes the gradients from tensors of the forward pass, its results included, where the
  /// device computes. Elements that are not written show: they are NaN, or `unwritten` bytes.
  void compute(Attention& attention, const ring::LocalTensors& forward, int unwritten = 0xff);
  /// Computes others, so that a later call cannot profit from what this one leaves behind.
  void compute_others(Attention& attention, const ring::LocalTensors& forward);
  [[nodiscard]] std::vector<std::vector<std::byte>> bytes() const;
  /// The errors of all ranks together. Where ranks hold copies, every copy counts. Entries whose
  /// magnitude is 0 must be exact. Collective over the group.
  [[nodiscard]] GradientErrors errors(const OracleGradients& truth, Control& group) const;

 private:
  [[nodiscard]] std::array<const DeviceTwin*, 3> gradients() const {
    return {&grad_query_, &grad_key_, &grad_value_};
  }
  void clear(int unwritten);

  const ring::ShardedOperands& operands_;
  ring::BackwardRequest request_;
  int rank_;
  Device& device_;
  std::unique_ptr<Stream> copies_;
  HostMemoryPool host_;
  DeviceTwin grad_output_, grad_lse_, grad_query_, grad_key_, grad_value_;
};

}  // namespace annulus::verification
