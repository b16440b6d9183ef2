#include "launcher/options/metadata_values.hpp"

#include <cstdint>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/options/nearest.hpp"
#include "launcher/options/option_values.hpp"

namespace annulus::launcher {
namespace {

template <class Value>
std::string text_of(const Value& value) {
  if constexpr (std::is_same_v<Value, ShardingRules>) {
    return to_json(value);
  } else if constexpr (std::is_enum_v<Value>) {
    return std::string(annulus::name_of(value));
  } else {
    return fmt::format("{}", value);
  }
}

// The fields as values of the corresponding options. `source` names them in messages: "run.json".
GivenValues as_options(const MetadataFields& fields, const std::string& source) {
  GivenValues values;
  const auto add = [&](const char* option, const char* key, const auto& field) {
    if (field) values[option] = {fmt::format("{} in {}", key, source), text_of(*field)};
  };
  const auto add_or_none = [&](const char* option, const char* key, const auto& field) {
    if (!field) return;
    add(option, key, *field);
    if (!*field) values[option] = {fmt::format("{} in {}", key, source), {}, true};
  };
  add("dtype", "runtime_dtype", fields.runtime_dtype);
  add("softmax-dtype", "runtime_softmax_dtype", fields.runtime_softmax_dtype);
  add_or_none("scale", "softmax_scale", fields.softmax_scale);
  add_or_none("soft-cap", "soft_cap", fields.soft_cap);
  add("dropout", "dropout_prob", fields.dropout_prob);
  add("seed", "dropout_seed", fields.dropout_seed);
  add("normalize-output", "normalize_output", fields.normalize_output);
  add_or_none("mesh", "mesh", fields.mesh);
  add("device", "backend", fields.backend);
  add_or_none("mode", "mode", fields.mode);
  add("impl", "implementation", fields.implementation);
  add("sharding-rules", "sharding_rules", fields.sharding_rules);
  add("sequence-axis", "sequence_axis_name", fields.sequence_axis_name);
  return values;
}

}  // namespace

ModelValues read_model(const GivenValue* file, const GivenValue* layer, bool wants_dtype) {
  ModelValues result;
  if (file == nullptr) return result;
  const std::string path = parse_name(file->option, file->text);
  std::optional<std::int64_t> number;
  if (layer != nullptr) number = parse_integer(layer->option, layer->text, 0, kMaximumLayers);
  const std::string shown = fmt::format("{} {}", file->option, path);
  ModelLayer model;
  try {
    model = read_model_config(files::read_text(path), path, number);
  } catch (const ArgumentError& error) {
    throw ArgumentError(layer == nullptr ? "--layer" : layer->option, error.value(),
                        error.expected());
  } catch (const FileError& error) {
    throw UserError(shown + std::string(error.what()).substr(error.path().size()));
  }
  const auto add = [&](const char* option, const char* key, std::string text) {
    result.values[option] = {fmt::format("{} in {}", key, path), std::move(text)};
  };
  if (wants_dtype && model.dtype) add("dtype", "dtype", text_of(*model.dtype));
  if (model.causal == true) add("causal", "architectures", "true");
  result.says_causal = model.causal.has_value();
  if (model.window) {
    const auto window = [&](std::int64_t left, std::int64_t right) {
      return GivenValue{fmt::format("sliding_window in {}", path),
                        fmt::format("{},{}", left, right)};
    };
    result.causal_window = window(model.window->left, 0);
    result.two_sided_window = window(model.window->either_side, model.window->either_side);
  }
  if (model.chunk) add("chunk", "attention_chunk_size", std::to_string(*model.chunk));
  if (model.scale) add("scale", "query_pre_attn_scalar", text_of(*model.scale));
  if (model.soft_cap) add("soft-cap", "attn_logit_softcapping", text_of(*model.soft_cap));
  result.sizes = model.sizes;
  result.has_sinks = model.has_sinks;
  return result;
}

MetadataValues read_metadata(const GivenValue* file, bool lenient) {
  const ParsedMetadata environment = metadata_from_environment();
  ParsedMetadata parsed;
  if (file != nullptr) {
    const std::string path = parse_name(file->option, file->text);
    parsed = as_option(fmt::format("{} {}", file->option, path), [&] {
      const std::string text = files::read_text(path);
      try {
        return parse_metadata(text, path);
      } catch (const ArgumentError& error) {  // names the key and the file
        throw UserError(fmt::format("{}: {}", file->option, error.what()));
      }
    });
    if (!lenient && !parsed.unknown.empty()) {
      const UnknownMetadataKey& key = parsed.unknown.front();
      throw UserError(fmt::format(
          "{} {}: unknown key '{}'{}; known keys are {} (--metadata-lenient ignores others)",
          file->option, path, key.name, nearest_hint(key.name, "", split_names(key.known)),
          key.known));
    }
  }
  MetadataValues result{as_options(parsed.fields, file == nullptr ? "" : file->text),
                        as_options(environment.fields, "the environment"), environment.warnings};
  const auto warn = [&result](const std::vector<std::string>& warnings) {
    result.warnings.insert(result.warnings.end(), warnings.begin(), warnings.end());
  };
  warn(parsed.warnings);
  warn(AttentionMetadata::resolve({}, parsed.fields, environment.fields).unused_hints());
  return result;
}

}  // namespace annulus::launcher
