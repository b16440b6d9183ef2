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

  /// Copies everything to the device and waits. Gradients to be computed begin as NaN, or as
  /// `unwritten` bytes, so that unwritten elements show.
  void upload(int unwritten = 0xff);
  /// The tensors of a call after an upload. `forward` holds inputs and results of the forward pass,
  /// in device memory.
  [[nodiscard]] ring::BackwardLocalTensors tensors(const ring::LocalTensors& forward) const;
  /// upload(), a call, and the results copied back to the host.
  void compute(Attention& attention, const ring::LocalTensors& forward, int unwritten = 0xff);
  /// Computes other gradients, so that a later call cannot profit from leftovers of an earlier one.
  void compute_others(Attention& attention, const ring::LocalTensors& forward);
  [[nodiscard]] std::vector<std::vector<std::byte>> bytes() const;
  /// True if the gradients have the same bits as in `whole`, the gradients of the whole problem.
  [[nodiscard]] bool are_parts_of(const GradientShards& whole) const;
  /// The errors over all ranks. If ranks hold copies, every copy counts. Entries of magnitude 0
  /// must be exact. Collective over the group.
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
