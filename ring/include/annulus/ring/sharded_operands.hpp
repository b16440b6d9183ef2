#pragma once

#include <annulus/attention/problem.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/attention_mode.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/partition/partition_spec.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus::ring {

/// How the tensors of a problem are sharded over a mesh. Output is sharded as query, except that
/// its last dimension is Dv; LSE [B,N,T] likewise.
struct ShardedOperands {
  NamedSharding query;
  NamedSharding key;
  NamedSharding value;
  NamedSharding output;
  NamedSharding lse;
};

struct OperandLayout {
  PartitionSpec query;  ///< of [B,T,N,D]
  PartitionSpec kv;     ///< of [B,S,K,D]
  LayoutKind sequence = LayoutKind::contiguous;
  std::int64_t granule = 1;  ///< see SequenceLayout
};

/// The layout where nobody says otherwise: the specs of the sharding rules for `mode`, as far as
/// the mesh has their axes; zigzag under a causal mask, which gives all ranks the same work,
/// contiguous otherwise.
[[nodiscard]] OperandLayout usual_layout(const AttentionProblem& problem, const MeshShape& mesh,
                                         AttentionMode mode);
/// The same for the mode that the problem's lengths suggest.
[[nodiscard]] OperandLayout usual_layout(const AttentionProblem& problem, const MeshShape& mesh);

/// Throws the spec errors of partition_spec.hpp. Query and key/value must lie alike along batch and
/// heads (ArgumentError), the head dimension must not be sharded, and N and K divide by the head
/// axes, or the head axes by K.
[[nodiscard]] ShardedOperands shard_operands(const AttentionProblem& problem, const MeshShape& mesh,
                                             const OperandLayout& layout);

}  // namespace annulus::ring
