#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// The most bytes that a rank's part of the attention weights may take, with the keys of all ranks
/// that it gathers to compute them.
inline constexpr std::int64_t kMaximumWeightBytes = std::int64_t{4} << 30;

/// The sharding of the weights [B,N,T,S] of a problem: batch, heads and query rows as for the
/// output, with all keys on every rank.
[[nodiscard]] NamedSharding weights_sharding(const AttentionProblem& problem,
                                             const ShardedOperands& operands);

/// Throws UnsupportedError if a rank's weights and gathered keys take more than
/// kMaximumWeightBytes.
void check_weights_fit(const AttentionProblem& problem, const ShardedOperands& operands);

/// Computes this rank's attention weights: see annulus::attention_weights(). Reads query, key, bias
/// and mask of `tensors`, which are shards in host memory. `weights` has the local shape of
/// weights_sharding() and weights_dtype(). Gathers all keys of the rank's batches and heads, in
/// memory of the device's pool. Collective over the mesh; all ranks throw the same UserError for
/// views that do not fit.
void compute_weights(const AttentionProblem& problem, const ShardedOperands& operands, Mesh& mesh,
                     Device& device, const LocalTensors& tensors, const TensorView& weights,
                     int threads);

}  // namespace annulus::ring
