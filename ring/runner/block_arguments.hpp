#pragma once

#include <cstddef>
#include <cstdint>

#include <annulus/attention/implementation.hpp>
#include <annulus/ring/plan.hpp>

#include "runner/arrivals.hpp"
#include "runner/plan_memory.hpp"

namespace annulus::ring {

/// The arguments of kernels: blocks of a plan, as views of its memory.
class BlockArguments {
 public:
  /// The references must outlive it.
  BlockArguments(const RankPlan& plan, const PlanMemory& memory, const Arrivals& arrivals,
                 const CallArgumentArrays& call_arguments, std::int64_t kv_length)
      : plan_(plan),
        memory_(memory),
        arrivals_(arrivals),
        call_arguments_(call_arguments),
        kv_length_(kv_length) {}

  /// The block is task `index`.
  [[nodiscard]] AttentionBlock of(std::size_t index, const Block& block) const;
  [[nodiscard]] annulus::BackwardBlock of(const BackwardBlock& block) const;
  [[nodiscard]] Gradients gradients_of(const BackwardBlock& block) const;

 private:
  const RankPlan& plan_;
  const PlanMemory& memory_;
  const Arrivals& arrivals_;
  const CallArgumentArrays& call_arguments_;
  std::int64_t kv_length_;
};

}  // namespace annulus::ring
