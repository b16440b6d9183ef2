#pragma once

#include <optional>

#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/attention_mode.hpp>
#include <annulus/partition/partition_spec.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {

/// The spec of every tensor that an attention call reads or writes.
struct AttentionShardings {
  PartitionSpec query;           ///< [B,T,N,D]
  PartitionSpec key;             ///< [B,S,K,D]
  PartitionSpec value;           ///< [B,S,K,Dv]
  PartitionSpec output;          ///< [B,T,N,Dv]
  PartitionSpec lse;             ///< [B,N,T]
  PartitionSpec weights;         ///< [B,N,T,S]
  PartitionSpec bias;            ///< broadcastable to [B,N,T,S]
  PartitionSpec mask;            ///< likewise
  PartitionSpec query_segments;  ///< [B,T]
  PartitionSpec kv_segments;     ///< [B,S]
  PartitionSpec lengths;         ///< [B]
  PartitionSpec sinks;           ///< [N,M] or [M]
};

/// Inputs of the specs besides rules, mesh and mode.
struct AttentionShardingOptions {
  /// Shapes of bias and mask if they are broadcast to [B,N,T,S]. Dimensions of size 1 are not
  /// sharded.
  std::optional<Extents> bias = {};
  std::optional<Extents> mask = {};
  int sinks_rank = 2;  ///< 2: [N,M]; 1: [M]
  /// True if query, key, value and output are [B,N,T,D], [B,K,S,D] and so on ("BHTD").
  bool bhtd = false;
};

/// The shardings that the rules give in one mode, with the default rules reduced to the axes of
/// `mesh`. Throws UnknownAxisError if a user's rule names an axis that the mesh lacks,
/// DuplicateSpecError if the rules shard two dimensions of one tensor along the same axis, and
/// ArgumentError for a bias or mask of more than 4 dimensions or sinks of another rank.
[[nodiscard]] AttentionShardings get_shardings(const ShardingRules& rules, const MeshShape& mesh,
                                               AttentionMode mode,
                                               const AttentionShardingOptions& options = {});

}  // namespace annulus
