#pragma once

#include <annulus/core/device.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/device_twin.hpp>
#include <annulus/verification/verification.hpp>

namespace annulus::verification {

/// The problem of a case as it is planned, before values come with the calls: with full lengths,
/// and with other offsets, sinks and seeds than the calls have.
[[nodiscard]] AttentionProblem planned_problem(const ShardedCase& sharded_case);

/// The values that come with the calls of a case on one rank, and other legal ones.
class CalledValues {
 public:
  /// `rank` of the mesh. The context must outlive it.
  CalledValues(const ShardedCase& sharded_case, const ring::ShardedOperands& operands,
               Context& context);

  [[nodiscard]] bool any() const noexcept { return any_; }
  [[nodiscard]] ring::CallValues own() const { return values_of(own_); }
  [[nodiscard]] ring::CallValues others() const { return values_of(others_); }

 private:
  // A tensor without dimensions is not passed.
  struct Values {
    DeviceTwin query_lengths, kv_lengths, offsets, sinks, seed;
  };

  [[nodiscard]] ring::CallValues values_of(const Values& values) const;

  bool any_;
  bool in_device_memory_;
  HostMemoryPool host_;
  Values own_, others_;
};

}  // namespace annulus::verification
