#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/verification/device_twin.hpp>
#include <annulus/verification/gradient_verification.hpp>

namespace annulus::verification {

/// One rank's part of the backward pass of a case: random gradients of the results, and the
/// gradients to be computed.
class GradientShards {
 public:
  /// Collective over the context, which must outlive it, as must `operands`.
  GradientShards(const ring::ShardedOperands& operands, const AttentionProblem& problem,
                 const ring::BackwardRequest& request, std::uint64_t seed, Context& context);

  /// Copies everything to the device, where it is when this returns. Gradients to be computed are
  /// NaN before, or `unwritten` bytes, so that elements that are not written show.
  void upload(int unwritten = 0xff);
  /// The tensors that a call takes after an upload, with the tensors of the forward pass, its
  /// results included, where the device computes.
  [[nodiscard]] ring::BackwardLocalTensors tensors(const ring::LocalTensors& forward) const;
  /// upload(), a call, and its results back in host memory.
  void compute(Attention& attention, const ring::LocalTensors& forward, int unwritten = 0xff);
  /// Computes others, so that a later call cannot profit from what this one leaves behind.
  void compute_others(Attention& attention, const ring::LocalTensors& forward);
  [[nodiscard]] std::vector<std::vector<std::byte>> bytes() const;
  /// True if they have the bits that `whole` has for the whole problem.
  [[nodiscard]] bool are_parts_of(const GradientShards& whole) const;
  /// The errors of all ranks together. Where ranks hold copies, every copy counts. Entries whose
  /// magnitude is 0 must be exact. Collective over the group.
  [[nodiscard]] GradientErrors errors(const OracleGradients& truth, Control& group) const;

 private:
  [[nodiscard]] std::vector<const DeviceTwin*> gradients() const {
    std::vector<const DeviceTwin*> all{&grad_query_, &grad_key_, &grad_value_};
    if (request_.grad_sinks) all.push_back(&grad_sinks_);
    if (request_.grad_bias) all.push_back(&grad_bias_);
    return all;
  }

  const ring::ShardedOperands& operands_;
  ring::BackwardRequest request_;
  int rank_;
  Device& device_;
  std::unique_ptr<Stream> copies_;
  HostMemoryPool host_;
  DeviceTwin grad_output_, grad_lse_, grad_query_, grad_key_, grad_value_, grad_sinks_, grad_bias_;
  std::int64_t first_sink_ = 0;  // of the rank, among all
};

}  // namespace annulus::verification
