#pragma once

#include <cstdint>
#include <vector>

#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

enum class Operand : std::uint8_t { rows, columns };

/// The ranks that hold the same part of an operand and use it for different work, so that its
/// gradient is the sum of their parts: ranks that share rows and have different columns, or the
/// other way round. Ranks that share both do the same work, and only one of them counts.
struct Replicas {
  AxisNames axes;            ///< that tell the ranks apart
  std::vector<int> members;  ///< their ranks in the group along `axes`, ascending
  [[nodiscard]] bool several() const noexcept { return members.size() > 1; }
};

[[nodiscard]] Replicas replicas_of(const ShardedOperands& operands, Operand operand, int rank);

/// The ranks that contribute to the gradient of this rank's sinks: all that have rows or batches of
/// its heads, or of any head if heads share their sinks.
[[nodiscard]] Replicas replicas_of_sinks(const ShardedOperands& operands, bool shared, int rank);

/// The ranks that contribute to the gradient of this rank's part of the bias: all that have
/// batches, heads or rows over which it is broadcast, or other columns of the same rows.
[[nodiscard]] Replicas replicas_of_bias(const ShardedOperands& operands, int rank);

}  // namespace annulus::ring
