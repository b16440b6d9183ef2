#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/verification.hpp>

#include "launcher/options/options.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {

/// Square blocks at the begin of one problem on one rank, as a ring has them, and the states that
/// kernels make of them.
class KernelBlocks {
 public:
  /// Draws the tensors of the problem that the options describe, with T = S = `length`. Not
  /// collective; throws UserErrors.
  KernelBlocks(const Options& options, std::int64_t length, Device& device, Watchdog watchdog,
               int threads);

  /// Who can compute the problem.
  [[nodiscard]] const Selection& selection() const noexcept { return selection_; }
  /// Blocks are computed by this candidate from now on.
  void use(const Implementation& candidate);
  /// Makes the first `rows` rows and columns ready. Returns why the candidate does not compute
  /// them; empty if it does. Throws ArgumentError if the mask hides them all.
  [[nodiscard]] std::string select(std::int64_t rows);
  /// Computes the block into both states, `calls` times in all, and waits for the end.
  void compute(int calls);

  [[nodiscard]] double flops() const noexcept { return flops_; }
  [[nodiscard]] Place place() const noexcept { return device_.place(); }
  [[nodiscard]] const AttentionProblem& problem() const noexcept { return setup_.problem; }

 private:
  struct State {
    Tensor output, lse;
  };
  [[nodiscard]] SoftmaxState state(std::size_t which) const;

  Device& device_;
  int threads_;
  Registry registry_ = Registry::standard();
  ProblemSetup setup_;
  verification::CaseShards shards_;
  verification::DeviceTensors tensors_;
  std::unique_ptr<Stream> stream_;
  Selection selection_;
  ScoreTensors scores_;
  std::array<State, 2> states_;
  const Implementation* candidate_ = nullptr;
  std::unique_ptr<Kernel> kernel_;
  AttentionBlock block_;
  double flops_ = 0;
};

}  // namespace annulus::launcher
