#pragma once

#include <optional>

#include <annulus/core/stream.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/ring/plan.hpp>

#include "runner/plan_memory.hpp"
#include "runner/sink_states.hpp"

namespace annulus::ring {

/// The tasks of a plan that merge, add up or prepare what lies on one rank, as operations on views
/// of its memory.
class LocalTasks {
 public:
  /// The references must outlive it; `sinks` may still be empty.
  LocalTasks(const RankPlan& plan, const PlanMemory& memory, const LocalOperations& operations,
             const std::optional<SinkStates>& sinks, Stream& stream)
      : plan_(plan), memory_(memory), operations_(operations), sinks_(sinks), stream_(stream) {}

  /// Each is ordered by the stream.
  void submit(const Reduce& reduce) const;
  void submit(const Delta& delta) const;
  void submit(const SinkGradient& gradient) const;

 private:
  const RankPlan& plan_;
  const PlanMemory& memory_;
  const LocalOperations& operations_;
  const std::optional<SinkStates>& sinks_;
  Stream& stream_;
};

}  // namespace annulus::ring
