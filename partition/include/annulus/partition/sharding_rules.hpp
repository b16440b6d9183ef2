#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus {

/// The kind of work that an attention call is part of. Sharding rules may differ between modes.
enum class AttentionMode : std::uint8_t { train, prefill, autoregressive, insert };

inline constexpr std::array kAttentionModes{AttentionMode::train, AttentionMode::prefill,
                                            AttentionMode::autoregressive, AttentionMode::insert};

[[nodiscard]] std::string_view name_of(AttentionMode mode) noexcept;
/// Throws ArgumentError("mode", …).
[[nodiscard]] AttentionMode parse_attention_mode(std::string_view name);
/// The mode of a call that does not name one: autoregressive if `query_length` is 1, else train.
[[nodiscard]] AttentionMode infer_attention_mode(std::int64_t query_length) noexcept;

/// The meaning of a dimension of an attention tensor.
enum class SemanticAxis : std::uint8_t {
  batch,
  query_length,
  kv_length,
  head,  ///< query heads, also the heads of masks, biases and sinks
  kv_head,
  head_dim  ///< D and Dv
};

inline constexpr std::array kSemanticAxes{SemanticAxis::batch,     SemanticAxis::query_length,
                                          SemanticAxis::kv_length, SemanticAxis::head,
                                          SemanticAxis::kv_head,   SemanticAxis::head_dim};

[[nodiscard]] std::string_view name_of(SemanticAxis axis) noexcept;
/// Throws ArgumentError("semantic axis", …).
[[nodiscard]] SemanticAxis parse_semantic_axis(std::string_view name);

/// A user's rule: the mesh axes of a semantic axis, in one mode or, without a mode, in all modes.
/// An empty list of axes is an explicit "none".
struct ShardingRule {
  SemanticAxis axis = SemanticAxis::batch;
  std::optional<AttentionMode> mode;
  AxisNames axes;
  bool operator==(const ShardingRule&) const = default;
};

/// The mesh axes of each semantic axis, per mode (docs/semantics.md §3). A user's rule for one mode
/// takes precedence over one for all modes, and that over the default: batch = (fsdp, dp), query
/// and kv length = sp, head and kv head = tp, head dim = none.
class ShardingRules {
 public:
  /// The defaults.
  ShardingRules();

  /// Adds a rule. It replaces an earlier one for the same axis and mode.
  void set(ShardingRule rule);
  /// The user's rules, sorted by axis; within an axis, the rule for all modes comes first.
  [[nodiscard]] const std::vector<ShardingRule>& rules() const noexcept { return rules_; }
  [[nodiscard]] const AxisNames& axes(SemanticAxis axis, AttentionMode mode) const noexcept;

  /// Returns the rules with their defaults reduced to the axes of `mesh`. Throws UnknownAxisError
  /// if a user's rule names an axis that the mesh lacks.
  [[nodiscard]] ShardingRules for_mesh(const MeshShape& mesh) const;

  // The resulting specs. All throw DuplicateSpecError if the rules shard two dimensions of one
  // tensor along the same mesh axis.

  /// Query [B,T,N,D] and output [B,T,N,Dv].
  [[nodiscard]] PartitionSpec query_spec(AttentionMode mode) const;
  /// Key [B,S,K,D] and value [B,S,K,Dv].
  [[nodiscard]] PartitionSpec kv_spec(AttentionMode mode) const;
  /// LSE [B,N,T].
  [[nodiscard]] PartitionSpec lse_spec(AttentionMode mode) const;
  /// Bias, dense mask and attention weights. `shape` is broadcastable to [B,N,T,S] and has at most
  /// 4 dimensions. Dimensions of size 1 are not sharded, nor is S.
  [[nodiscard]] PartitionSpec bias_spec(AttentionMode mode, const Extents& shape) const;
  /// Segment ids [B,T] of queries and [B,S] of keys.
  [[nodiscard]] PartitionSpec query_segments_spec(AttentionMode mode) const;
  [[nodiscard]] PartitionSpec kv_segments_spec(AttentionMode mode) const;
  /// Lengths [B].
  [[nodiscard]] PartitionSpec lengths_spec(AttentionMode mode) const;
  /// Sinks [N,M]; sinks [M] (rank 1) are not sharded.
  [[nodiscard]] PartitionSpec sinks_spec(AttentionMode mode, int rank) const;

  bool operator==(const ShardingRules&) const = default;

 private:
  std::vector<ShardingRule> rules_;
  std::array<AxisNames, kSemanticAxes.size()> defaults_;
};

/// `spec`, reduced to the `preserved` dimensions; the others become none. Without `preserved` all
/// dimensions keep their axes. Without a mesh (null) the result is `spec` itself. With a mesh but
/// without a tensor, there is no result. Throws ArgumentError for a negative dimension.
[[nodiscard]] std::optional<PartitionSpec> create_stable_sharding(
    const PartitionSpec& spec, const MeshShape* mesh, bool has_dependency,
    const std::optional<std::vector<int>>& preserved);

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
