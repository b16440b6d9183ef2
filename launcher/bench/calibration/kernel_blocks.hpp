#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/ring/used_share.hpp>
#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/device_twin.hpp>
#include <annulus/verification/verification.hpp>

#include "launcher/bench/repeated_call.hpp"
#include "launcher/options/options.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {

/// Square blocks from the beginning of a problem on one rank, as in a ring, with their softmax
/// states or, in the backward pass, their gradients. Several kernels compute one block in turn.
class KernelBlocks {
 public:
  /// Draws the tensors of the problem that the options describe, with T = S = `length`; the options
  /// also say which pass. Not collective; throws UserErrors.
  KernelBlocks(const Options& options, std::int64_t length, Device& device, Watchdog watchdog,
               int threads);

  /// The implementations that can compute the problem.
  [[nodiscard]] const Selection& selection() const noexcept { return selection_; }
  /// From now on the block has the first `rows` rows and columns. Throws ArgumentError if the mask
  /// hides all of it.
  void select(std::int64_t rows);
  /// Prepares a candidate for the block. Returns why it cannot compute the block, or not at the
  /// rate of its other blocks; empty if it can.
  [[nodiscard]] std::string prepare(const Implementation& candidate);
  /// Computes the block with a prepared candidate, `calls` times, into two states in turn, and
  /// waits for the end.
  void compute(const Implementation& candidate, int calls);

  [[nodiscard]] double flops() const noexcept { return flops_; }
  /// The share of the device's rate that the block gets from this candidate.
  [[nodiscard]] double used_share(const Implementation& candidate) const;
  [[nodiscard]] const AttentionProblem& problem() const noexcept { return setup_.problem; }
  [[nodiscard]] Pass pass() const noexcept { return pass_; }

 private:
  struct Candidate {
    std::unique_ptr<Kernel> kernel;
    DType results;  ///< dtype of its outputs
    std::optional<RepeatedCall> call;
  };
  [[nodiscard]] SoftmaxState state(DType dtype, int which);
  void make_gradients(const Options& options, const Watchdog& watchdog);
  [[nodiscard]] BackwardBlock backward_block() const;
  [[nodiscard]] Gradients gradients() const;
  /// Throws UnsupportedError if the kernel refuses the block.
  void prepare_forward(Candidate& candidate);
  void prepare_backward(Candidate& candidate);

  Device& device_;
  int threads_;
  Pass pass_;
  Registry registry_ = Registry::standard();
  ProblemSetup setup_;
  verification::CaseShards shards_;
  verification::DeviceTensors tensors_;
  std::unique_ptr<Stream> stream_;
  Selection selection_;
  ScoreTensors scores_;
  std::map<std::pair<DType, int>, Tensor> outputs_;
  std::array<Tensor, 2> lse_;
  // Additional inputs of the backward pass, and the gradients that it adds to.
  verification::DeviceTwin grad_output_, whole_lse_;
  Tensor delta_, grad_query_, grad_key_, grad_value_;
  AttentionBlock block_;
  ring::BlockExtent extent_;
  double flops_ = 0;
  std::map<const Implementation*, Candidate> candidates_;
};

}  // namespace annulus::launcher
