#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <annulus/attention/problem.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/attention_mode.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/partition/partition_spec.hpp>
#include <annulus/partition/sequence_layout.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus::ring {

/// How the tensors of a problem are sharded over a mesh. Output is sharded as query, except that
/// its last dimension is Dv; LSE [B,N,T], and maximum and sum of an unnormalised output, are
/// sharded likewise.
struct ShardedOperands {
  NamedSharding query;
  NamedSharding key;
  NamedSharding value;
  NamedSharding output;
  NamedSharding lse;
  /// Bias and dense mask [B,N,T,S], if the problem has them, by scores_spec(): each rank has all
  /// keys of its rows.
  std::optional<NamedSharding> bias = {};
  std::optional<NamedSharding> dense_mask = {};
};

struct OperandLayout {
  PartitionSpec query;                           ///< of [B,T,N,D]
  PartitionSpec kv;                              ///< of [B,S,K,D]
  LayoutKind sequence = LayoutKind::contiguous;  ///< of queries; of keys too without kv_sequence
  /// The granule of both sequences: see SequenceLayout, and assign_rows() if balanced. The default
  /// is 1, or that of assign_rows() if balanced.
  std::optional<std::int64_t> granule = {};
  std::optional<LayoutKind> kv_sequence = {};
};

/// The spec of a bias or a dense mask of this shape, [B,N,T,S], beside queries of this spec:
/// batches, heads and rows on the query's axes, dimensions of size 1 and keys on none.
[[nodiscard]] PartitionSpec scores_spec(const Extents& scores, const PartitionSpec& query);

/// "zigzag", "zigzag:128" with a granule, "zigzag,contiguous" if keys have another layout.
[[nodiscard]] std::string layout_text(const OperandLayout& layout);

/// The caller's choices for the layout of a problem on a mesh; the rest follows from the problem
/// (default_layout()).
struct LayoutOptions {
  /// Specs of query and output [B,T,N,D], and of key and value [B,S,K,D]. Without them, `rules`
  /// decide, for `mode`.
  std::optional<PartitionSpec> query_spec = {};
  std::optional<PartitionSpec> kv_spec = {};
  /// The default rules shard the batch along fsdp and dp, the sequence along sp and heads along tp,
  /// as far as the mesh has these axes.
  ShardingRules rules = {};
  std::optional<AttentionMode> mode = {};  ///< default: see infer_attention_mode()
  /// The distribution of a sharded sequence. Default: zigzag under a causal mask, which gives all
  /// ranks the same work if nothing else is masked; contiguous otherwise; balanced if documents,
  /// blocks or lengths of the mask make these uneven.
  std::optional<LayoutKind> layout = {};
  /// The layout of key and value; the same as `layout` if absent.
  std::optional<LayoutKind> kv_layout = {};
  /// Chunks of a sequence are multiples of this many positions; see SequenceLayout.
  std::optional<std::int64_t> granule = {};
};

/// The layout with the parts that `options` set, and defaults for the others. The default specs
/// follow the sharding rules for the mode, with default rules reduced to the axes that the mesh
/// has. The default sequence layout of a sharded sequence under a causal mask is zigzag, which
/// gives all ranks the same work if nothing else is masked; it is contiguous otherwise.
///
/// It is balanced instead if that layout would give a rank at least 10 % more visible tiles than
/// the mean, and balanced rows would at least halve the excess. Packed documents, block masks or
/// lengths can cause this. Queries and keys must also have the same length and axes, and ranks 256
/// rows or more.
///
/// Throws UnknownAxisError if a rule in `options` names an axis that the mesh lacks, and
/// DuplicateSpecError if the rules shard two dimensions along one axis.
[[nodiscard]] OperandLayout default_layout(const AttentionProblem& problem, const MeshShape& mesh,
                                           const LayoutOptions& options = {});

/// Balanced rows follow from the mask (see assign_rows()). Balanced keys have the same layout if
/// there are as many of them, on the same axes; otherwise they are assigned by the number of rows
/// that see them.
///
/// Throws the spec errors of partition_spec.hpp. Query and key/value must have the same axes for
/// batch and heads (ArgumentError), the head dimension must not be sharded, and the number of head
/// shards must divide N, and divide or be a multiple of K.
[[nodiscard]] ShardedOperands shard_operands(const AttentionProblem& problem, const MeshShape& mesh,
                                             const OperandLayout& layout);

}  // namespace annulus::ring
