#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/comparison.hpp>
#include <annulus/verification/verification.hpp>

namespace annulus::verification {

/// The most rows of a rank that sampled_deviation() compares.
inline constexpr std::int64_t kSampledRows = 8;
/// Keys and values of one head that it makes at a time, on each thread.
inline constexpr std::int64_t kSampledColumns = 8192;

/// The deviation of a few rows of a rank from the oracle's. The rows are evenly spread, each from
/// another batch and key/value head if there are enough. `shards` are the rank's own, of this seed,
/// with their results. Not collective.
[[nodiscard]] Deviation sampled_deviation(const AttentionProblem& problem,
                                          const ring::ShardedOperands& operands,
                                          const CaseShards& shards, std::uint64_t seed, int rank,
                                          int threads);

}  // namespace annulus::verification
