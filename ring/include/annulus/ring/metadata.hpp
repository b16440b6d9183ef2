#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/dtype.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {

struct AttentionOptions;
struct ContextOptions;

/// The kind of device that computes. `automatic` leaves the choice to the context.
enum class Backend : std::uint8_t { automatic, cpu, cuda };

[[nodiscard]] std::string_view name_of(Backend backend) noexcept;
/// "auto", "cpu" or "cuda". Throws ArgumentError("backend", …) for anything else.
[[nodiscard]] Backend parse_backend(std::string_view name);

/// The fields of AttentionMetadata that one source sets; the others are absent. In a nested
/// optional, an empty inner optional is an explicit none.
struct MetadataFields {
  std::optional<DType> runtime_dtype = {};
  std::optional<DType> runtime_softmax_dtype = {};
  std::optional<std::optional<double>> softmax_scale = {};
  std::optional<std::optional<double>> soft_cap = {};
  std::optional<double> dropout_prob = {};
  std::optional<std::uint64_t> dropout_seed = {};
  std::optional<bool> normalize_output = {};
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
/// defaults are EasyDeL's, so its configurations can be used; dropout_seed, soft_cap,
/// sharding_rules, mode and implementation are additions in the same style. Plain data.
struct AttentionMetadata {
  DType runtime_dtype = DType::float32;          ///< of query, key, value and output
  DType runtime_softmax_dtype = DType::float32;  ///< or float64
  std::optional<double> softmax_scale = {};      ///< 1/√D if absent
  std::optional<double> soft_cap = {};           ///< no cap if absent
  double dropout_prob = 0;                       ///< in [0, 1)
  std::uint64_t dropout_seed = 0;
  bool normalize_output = true;  ///< see AttentionProblem
  // Hints: kernels choose their own tiles. See unused_hints().
  std::int64_t blocksize_q = 512;
  std::int64_t blocksize_k = 1024;
  std::int64_t blocksize_b = 1;
  bool scan_ring_attention = true;  ///< a hint too: rings are always planned hop by hop
  /// The mesh axis of both sequence dimensions, unless the sharding rules name another.
  std::string sequence_axis_name = "sp";
  /// "dp=2,sp=-1"; if absent, all ranks on the sequence axis.
  std::optional<std::string> mesh = {};
  ShardingRules sharding_rules = {};
  Backend backend = Backend::automatic;
  std::optional<AttentionMode> mode = {};  ///< inferred from the query length if absent
  std::string implementation = "auto";     ///< a name of the registry

  bool operator==(const AttentionMetadata&) const = default;

  /// Each field comes from the first source that sets it: explicit, file, environment, default.
  /// Throws what validate() throws.
  static AttentionMetadata resolve(const MetadataFields& explicit_fields,
                                   const MetadataFields& file = {},
                                   const MetadataFields& environment = {});
  /// A copy with other values for some fields. Throws what validate() throws.
  [[nodiscard]] AttentionMetadata replace(const MetadataFields& fields) const;
  /// Throws ArgumentError, naming the field, for a dtype that is not floating-point
  /// (softmax: float32 or float64); a scale that is not finite or a soft cap that is not positive
  /// in float32; a dropout probability outside [0, 1); a block size below 1; an empty name.
  void validate() const;

  /// The mode of calls with queries of this length: `mode`, else infer_attention_mode().
  [[nodiscard]] AttentionMode mode_of(std::int64_t query_length) const noexcept;
  /// The sharding rules. A sequence axis other than "sp" is added as the rule of both lengths if
  /// `sharding_rules` has none.
  [[nodiscard]] ShardingRules rules() const;
  /// The mesh as text: `mesh`, else "sp=-1" with the name of the sequence axis.
  [[nodiscard]] std::string mesh_text() const;
  /// One sentence for each hint that is not at its default; hints have no effect.
  [[nodiscard]] std::vector<std::string> unused_hints() const;
};

/// A key that is unknown at its place in the metadata.
struct UnknownMetadataKey {
  std::string name;
  std::string known;  ///< the keys that exist there: "softmax_scale, soft_cap"
};

/// Fields read from a file or the environment. `warnings` has one sentence for each unknown key,
/// which also lists the known ones.
struct ParsedMetadata {
  MetadataFields fields;
  std::vector<UnknownMetadataKey> unknown = {};
  std::vector<std::string> warnings = {};
};

/// A JSON object with a key for each field: dtypes, backend and mode as their names, sharding rules
/// as an object of semantic axes. The rule of an axis is a mesh axis, a list of them, null (not
/// sharded), or an object of such values by mode, with the key "all" for the other modes:
///
///     {"softmax_scale": 0.125, "mesh": "sp=4,tp=2",
///      "sharding_rules": {"head": "tp", "query_length": {"all": ["sp"], "autoregressive": null}}}
///
/// null means none for scale, soft cap, mesh and mode. Every field is written, and
/// parse_metadata(to_json(m)) returns every field of m, with its type.
[[nodiscard]] std::string to_json(const AttentionMetadata& metadata);

/// Reads what to_json() writes; keys may be missing. `source` names the text in messages, such as
/// "metadata.json". Throws ArgumentError, naming key and source, for a value of the wrong type or
/// out of range and for a repeated key; FileError(source, …) for text that is not a JSON object. An
/// unknown key is ignored, with a warning that names it.
[[nodiscard]] ParsedMetadata parse_metadata(std::string_view text, const std::string& source);

/// Writes sharding rules alone, on one line, in the form of the field sharding_rules.
/// parse_sharding_rules() reads them back. It throws ArgumentError("<source>", …) or
/// ArgumentError("<source>, entry 'head.train'", …), also for an unknown key.
[[nodiscard]] std::string to_json(const ShardingRules& rules);
[[nodiscard]] ShardingRules parse_sharding_rules(std::string_view text, const std::string& source);

/// The fields set in the environment: softmax_scale in ANNULUS_METADATA_SOFTMAX_SCALE, and so on. A
/// value is JSON, but text needs no quotes. Empty variables are ignored. Warnings and errors are as
/// for parse_metadata(), with the variable's name.
[[nodiscard]] ParsedMetadata metadata_from_environment();

/// The mesh and the place that the metadata ask for. Backend cuda means the CUDA device that is
/// current in the calling thread; without one, the constructor of Context throws.
[[nodiscard]] ContextOptions context_options(const AttentionMetadata& metadata);

/// The options that the metadata give for calls of this shape; the mask is not part of metadata.
/// Throws what AttentionMetadata::validate() throws.
///
///     const AttentionMetadata metadata = AttentionMetadata::resolve({.soft_cap = 30.0},
///         parse_metadata(text, "metadata.json").fields, metadata_from_environment().fields);
///     Context context(communicator, context_options(metadata));
///     Attention attention(context, attention_options(metadata, shape, mask));
[[nodiscard]] AttentionOptions attention_options(const AttentionMetadata& metadata,
                                                 const AttentionShape& shape,
                                                 const Mask& mask = {});

}  // namespace annulus
