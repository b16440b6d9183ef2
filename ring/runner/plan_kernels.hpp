#pragma once

#include <memory>
#include <span>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/device.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>

#include "runner/block_arguments.hpp"
#include "runner/plan_memory.hpp"

namespace annulus::ring {

/// The kernels that compute the blocks of a plan, made when they are first needed.
class PlanKernels {
 public:
  /// The references and implementations must outlive it; calls read `problem`.
  PlanKernels(const AttentionProblem& problem, const RankPlan& plan,
              std::span<const Implementation* const> implementations, Device& device)
      : problem_(problem),
        plan_(plan),
        implementations_(implementations.begin(), implementations.end()),
        device_(device),
        kernels_(implementations.size()) {}

  [[nodiscard]] Kernel& of(const Tile& block);

  /// Makes all anew for the tensors that `memory` is bound to, when no call is under way. Returns
  /// the blocks that a kernel refuses. Kernels that graphs of the caller use stay.
  [[nodiscard]] std::vector<Refusal> prepare(const BlockArguments& arguments,
                                             const PlanMemory& memory);

  /// A graph of the caller uses the kernels; it lives as long as the pointer is not expired.
  void hold_for(std::weak_ptr<void> graph) {
    (void)is_captured();  // forgets graphs that have gone
    graphs_.push_back(std::move(graph));
  }
  /// True if such a graph is left, be it of earlier kernels.
  [[nodiscard]] bool is_captured();

 private:
  [[nodiscard]] const Implementation& implementation_of(const Tile& block) const {
    return *implementations_[static_cast<std::size_t>(block.implementation)];
  }
  [[nodiscard]] bool is_rounded_at_once(const Block& block) const;

  using Kernels = std::vector<std::unique_ptr<Kernel>>;
  using Graphs = std::vector<std::weak_ptr<void>>;
  struct Retired {
    Kernels kernels;
    Graphs graphs;
  };

  const AttentionProblem& problem_;
  const RankPlan& plan_;
  std::vector<const Implementation*> implementations_;
  Device& device_;
  Kernels kernels_;  // by implementation; null until needed
  Graphs graphs_;
  std::vector<Retired> retired_;
};

}  // namespace annulus::ring
