#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/dtype.hpp>
#include <annulus/partition/attention_mode.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {

/// Where a forward pass computes. `automatic` leaves it to the context.
enum class Backend : std::uint8_t { automatic, cpu, cuda };

[[nodiscard]] std::string_view name_of(Backend backend) noexcept;
/// "auto", "cpu" or "cuda". Throws ArgumentError("backend", …) for anything else.
[[nodiscard]] Backend parse_backend(std::string_view name);

/// The fields of AttentionMetadata that somebody gives; the others are absent. For fields that may
/// be "none", an inner absence is an explicit none.
struct MetadataFields {
  std::optional<DType> runtime_dtype = {};
  std::optional<DType> runtime_softmax_dtype = {};
  std::optional<std::optional<double>> softmax_scale = {};
  std::optional<std::optional<double>> soft_cap = {};
  std::optional<double> dropout_prob = {};
  std::optional<std::uint64_t> dropout_seed = {};
  std::optional<std::int64_t> blocksize_q = {};
  std::optional<std::int64_t> blocksize_k = {};
  std::optional<std::int64_t> blocksize_b = {};
  std::optional<std::string> sequence_axis_name = {};
  std::optional<bool> scan_ring_attention = {};
  std::optional<std::optional<std::string>> mesh = {};
  std::optional<ShardingRules> sharding_rules = {};
  std::optional<Backend> backend = {};
  std::optional<std::optional<AttentionMode>> mode = {};
  std::optional<std::string> implementation = {};

  bool operator==(const MetadataFields&) const = default;
};

/// The configuration of attention calls, apart from their tensors (docs/semantics.md §2). Names and
/// defaults are EasyDeL's, so its configurations carry over; seed, soft cap, sharding rules, mode
/// and implementation are named in the same way. Plain data.
struct AttentionMetadata {
  DType runtime_dtype = DType::float32;          ///< of query, key, value and output
  DType runtime_softmax_dtype = DType::float32;  ///< or float64
  std::optional<double> softmax_scale = {};      ///< 1/√D if absent
  std::optional<double> soft_cap = {};           ///< no cap if absent
  double dropout_prob = 0;                       ///< from 0 to below 1
  std::uint64_t dropout_seed = 0;
  // Hints: kernels choose their own tiles. See unused_hints().
  std::int64_t blocksize_q = 512;
  std::int64_t blocksize_k = 1024;
  std::int64_t blocksize_b = 1;
  bool scan_ring_attention = true;  ///< likewise: rings are always planned hop by hop
  /// The mesh axis of queries and keys, where the sharding rules name no other.
  std::string sequence_axis_name = "sp";
  /// "dp=2,sp=-1"; if absent, all ranks on the sequence axis.
  std::optional<std::string> mesh = {};
  ShardingRules sharding_rules = {};
  Backend backend = Backend::automatic;
  std::optional<AttentionMode> mode = {};  ///< inferred from the query length if absent
  std::string implementation = "auto";     ///< a name of the registry

  bool operator==(const AttentionMetadata&) const = default;

  /// The value of each field comes from the first of these that gives it: explicit, then file, then
  /// environment, then the default. Throws what validate() throws.
  static AttentionMetadata resolve(const MetadataFields& explicit_fields,
                                   const MetadataFields& file = {},
                                   const MetadataFields& environment = {});
  /// A copy with other values for some fields. Throws what validate() throws.
  [[nodiscard]] AttentionMetadata replace(const MetadataFields& fields) const;
  /// Throws ArgumentError, naming the field, for a dtype that is not float16, bfloat16 or float32
  /// (softmax: float32 or float64); a scale that is not finite or a soft cap that is not positive
  /// in float32; a dropout probability outside [0, 1); a block size below 1; an empty name.
  void validate() const;

  /// The mode of calls with queries of this length: `mode`, else as infer_attention_mode() says.
  [[nodiscard]] AttentionMode mode_of(std::int64_t query_length) const noexcept;
  /// The sharding rules, in which an axis name other than "sp" is the rule for both lengths, where
  /// the user has none for them.
  [[nodiscard]] ShardingRules rules() const;
  /// The mesh as text: `mesh`, else "sp=-1" with the name of the sequence axis.
  [[nodiscard]] std::string mesh_text() const;
  /// One sentence for each field that is not its default and has no effect.
  [[nodiscard]] std::vector<std::string> unused_hints() const;
};

/// Fields from outside the program, and what was wrong with what was not taken: one sentence for
/// each unknown key, with the known ones.
struct ParsedMetadata {
  MetadataFields fields;
  std::vector<std::string> warnings;
};

/// A JSON object with a key for each field: dtypes, backend and mode as their names, sharding rules
/// as an object of semantic axes. The rule of an axis is a mesh axis, a list of them, null (not
/// sharded), or an object of these by mode, with the key "all" for the other modes:
///
///     {"softmax_scale": 0.125, "mesh": "sp=4,tp=2",
///      "sharding_rules": {"head": "tp", "query_length": {"all": ["sp"], "autoregressive": null}}}
///
/// null means none for scale, soft cap, mesh and mode. Every field is written, and
/// parse_metadata(to_json(m)) gives m back, type by type.
[[nodiscard]] std::string to_json(const AttentionMetadata& metadata);

/// Reads what to_json() writes, or some of its keys. `source` is for messages: "metadata.json".
/// Throws ArgumentError, naming key and source, for a value of another type or range and for a key
/// that comes twice; FileError(source, …) for text that is not a JSON object. An unknown key is a
/// warning, with its name; it is ignored.
[[nodiscard]] ParsedMetadata parse_metadata(std::string_view text, const std::string& source);

/// Sharding rules alone, as the field sharding_rules has them, in one line; and back. Throws
/// ArgumentError("sharding rules in <source>", …), for an unknown key too.
[[nodiscard]] std::string to_json(const ShardingRules& rules);
[[nodiscard]] ShardingRules parse_sharding_rules(std::string_view text, const std::string& source);

/// The fields that environment variables give: softmax_scale from ANNULUS_METADATA_SOFTMAX_SCALE,
/// and so on, as JSON, text without quotes. Empty variables are ignored. Warnings and errors as for
/// parse_metadata(), with the variable's name.
[[nodiscard]] ParsedMetadata metadata_from_environment();

}  // namespace annulus
