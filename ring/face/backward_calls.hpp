#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus {

/// The backward pass of an Attention: a plan for each kind of call, made at the first use.
class BackwardCalls {
 public:
  /// The references must outlive it.
  BackwardCalls(Context& context, const ring::ShardedOperands& operands,
                ring::ShardedAttentionOptions options);

  /// The pass for this problem and this mask, planned if it is not yet. Collective over the
  /// context: all ranks throw the same error.
  ring::ShardedAttention& of(const AttentionProblem& problem, const Mask& mask,
                             const ring::BackwardRequest& request);
  /// See ShardedAttention::set_values; only for masks where that returns true.
  void set_values(const Mask& mask);
  /// Null before the first use.
  [[nodiscard]] ring::ShardedAttention* planned(
      const ring::BackwardRequest& request) const noexcept;
  /// Drops the plans when no call is under way, so that the next use plans again. A schedule that
  /// is to be kept comes from the dropped plan, or else stays as it was kept before.
  void drop(ring::NextSchedule next);
  /// True if a graph of the caller holds calls.
  [[nodiscard]] bool is_captured();
  void wait();

 private:
  // Four flags: the LSE has a gradient, the gradients of sinks and of the bias are wanted,
  // gradients are added.
  static constexpr std::size_t kKinds = 16;
  [[nodiscard]] static std::size_t index(const ring::BackwardRequest& request) noexcept {
    return (request.grad_bias ? 8U : 0U) + (request.grad_sinks ? 4U : 0U) +
           (request.grad_lse ? 2U : 0U) + (request.adds ? 1U : 0U);
  }

  Context& context_;
  const ring::ShardedOperands& operands_;
  ring::ShardedAttentionOptions options_;
  std::array<std::unique_ptr<ring::ShardedAttention>, kKinds> planned_;
  std::array<std::optional<ring::ScheduleVariant>, kKinds> kept_;  // of plans that were dropped
  // Passes for earlier masks that the caller's graphs still hold.
  std::vector<std::unique_ptr<ring::ShardedAttention>> captured_;
};

}  // namespace annulus
