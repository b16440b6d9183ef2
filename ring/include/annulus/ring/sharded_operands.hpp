#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <annulus/attention/problem.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/named_sharding.hpp>
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
/// The layout is balanced instead if the default would give a rank at least 10 % more visible tiles
/// than the mean, and balanced rows would at least halve the excess. Packed documents, block masks
/// or lengths can cause this. Queries and keys must also have the same length and axes, and every
/// rank must have at least 256 rows.
///
/// Throws UnknownAxisError if a rule in `options` names an axis that the mesh lacks, and
/// DuplicateSpecError if the rules shard two dimensions along one axis.
[[nodiscard]] OperandLayout default_layout(const AttentionProblem& problem, const MeshShape& mesh,
                                           const LayoutOptions& options = {});

/// Shards the tensors of a problem. Balanced rows follow from the mask (see assign_rows()).
/// Balanced keys have the same layout if there are as many of them, on the same axes; otherwise
/// they are assigned by the number of rows that see them.
///
/// Throws the spec errors of named_sharding.hpp. Query and key/value must have the same axes for
/// batch and heads (ArgumentError), the head dimension must not be sharded, and the number of head
/// shards must divide N, and divide or be a multiple of K.
[[nodiscard]] ShardedOperands shard_operands(const AttentionProblem& problem, const MeshShape& mesh,
                                             const OperandLayout& layout);

/// The call arguments of one call, as AttentionProblem::call_arguments names them. If a view has no
/// dimensions, or there is no seed, the values of the problem or of set_mask() hold. Views are
/// int32, with one number for all batches of the rank, [1], or one for each batch, [b]. Host values
/// are read before the call returns. Values in the memory of the computing device are read when the
/// call runs, in the order of the caller's stream: a length out of bounds then counts as the
/// nearest one within, and the next wait() throws. Ranks that hold the same batches must pass the
/// same values.
struct CallValues {
  ConstTensorView query_lengths = {};  ///< from 0 to the lengths of the problem's mask, or to T
  ConstTensorView kv_lengths = {};     ///< likewise, or S
  ConstTensorView offsets = {};        ///< of the diagonal: see Mask::set_offsets()
  std::optional<std::uint64_t> dropout_seed = {};
  const std::uint64_t* device_dropout_seed = nullptr;  ///< the seed, in the device's memory
  /// Sinks that replace the problem's; call_arguments need not name them. [n,M] for the rank's
  /// heads, or [M] if heads share the problem's sinks; float32, stride 1 in the last dimension,
  /// below +∞, in the device's memory. Read in the order of the caller's stream.
  ConstTensorView sinks = {};

  bool operator==(const CallValues&) const = default;
};

/// Local shards of one call, where the device computes. Head dimensions are innermost with stride
/// 1; other strides are free, but decide which kernels can run: kernels for half types on GPUs need
/// strides and addresses that are multiples of 16 bytes.
struct LocalTensors {
  ConstTensorView query;  ///< [b,t,n,D]
  ConstTensorView key;    ///< [b,s,k,D]
  ConstTensorView value;  ///< [b,s,k,Dv]
  TensorView output;      ///< [b,t,n,Dv], the problem's dtype
  TensorView lse;         ///< [b,n,t], float32; none with an unnormalised output
  /// The rank's rows of bias (float32) and dense mask (boolean), if the problem has them:
  /// [b,n,t,S], with 1 where they are broadcast; the last dimension has stride 1.
  ConstTensorView bias = {};
  ConstTensorView mask = {};
  /// Results of an unnormalised call, in place of an LSE: the largest logits and the sums of the
  /// exponentials relative to them, [b,n,t], float32.
  TensorView maximum = {};
  TensorView sum = {};
  /// [b,n,t,S], contiguous, of annulus::weights_dtype(): if the problem asks for attention weights.
  TensorView weights = {};
  CallValues call_values = {};

  bool operator==(const LocalTensors&) const = default;
};

/// Local shards of one call of the backward pass, likewise.
struct BackwardLocalTensors {
  ConstTensorView query;          ///< as in the forward pass, as are the next two
  ConstTensorView key;            ///< [b,s,k,D]
  ConstTensorView value;          ///< [b,s,k,Dv]
  ConstTensorView output;         ///< [b,t,n,Dv]: a result of the forward pass, as is the LSE
  ConstTensorView lse;            ///< [b,n,t], float32
  ConstTensorView grad_output;    ///< [b,t,n,Dv], the problem's dtype
  TensorView grad_query;          ///< [b,t,n,D], the problem's dtype, as are the next two
  TensorView grad_key;            ///< [b,s,k,D]
  TensorView grad_value;          ///< [b,s,k,Dv]
  ConstTensorView bias = {};      ///< as in the forward pass
  ConstTensorView mask = {};      ///< likewise
  ConstTensorView grad_lse = {};  ///< [b,n,t], float32; without dimensions: 0
  CallValues call_values = {};    ///< as in the forward pass
  /// [n,M] for the rank's heads, or [M] where all heads share the sinks; float32, stride 1 in the
  /// last dimension. Without dimensions: not wanted. All ranks want it, or none does.
  TensorView grad_sinks = {};
  /// [b,n,t,S], of the shape of `bias`; float32, stride 1 in the last dimension. Without
  /// dimensions: not wanted. All ranks want it, or none does.
  TensorView grad_bias = {};

  bool operator==(const BackwardLocalTensors&) const = default;
};

}  // namespace annulus::ring
