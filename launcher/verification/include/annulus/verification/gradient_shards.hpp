#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/device_twin.hpp>
#include <annulus/verification/gradient_verification.hpp>

namespace annulus::verification {

/// The sharding of sinks: [N,M] by head, as queries are, [M] whole on every rank.
[[nodiscard]] NamedSharding sinks_sharding(const NamedSharding& query, const Extents& sinks);

/// The tensors that a backward pass takes from its forward pass. Its gradients are not set.
[[nodiscard]] ring::BackwardLocalTensors backward_tensors(const ring::LocalTensors& forward);

/// One rank's part of the backward pass of a case: random gradients of the results, and the
/// gradients to be computed.
class GradientShards {
 public:
  /// Collective over the context, which must outlive it.
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
  struct Gradient {
    std::size_t number;  // in GradientErrors
    TensorView ring::BackwardLocalTensors::*tensor;
    NamedSharding sharding;
    DeviceTwin twin;
  };

  ring::BackwardRequest request_;
  int rank_;
  Device& device_;
  std::unique_ptr<Stream> copies_;
  HostMemoryPool host_;
  DeviceTwin grad_output_, grad_lse_;
  std::vector<Gradient> gradients_;
};

}  // namespace annulus::verification
