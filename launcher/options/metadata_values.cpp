#include "launcher/options/metadata_values.hpp"

#include <cstdint>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>

#include "launcher/options/as_option.hpp"

namespace annulus::launcher {
namespace {

std::string text_of(DType dtype) {
  return std::string(name_of(dtype));
}
std::string text_of(Backend backend) {
  return std::string(name_of(backend));
}
std::string text_of(AttentionMode mode) {
  return std::string(name_of(mode));
}
std::string text_of(bool value) {
  return value ? "true" : "false";
}
std::string text_of(double value) {
  return fmt::format("{}", value);
}
std::string text_of(std::uint64_t value) {
  return std::to_string(value);
}
const std::string& text_of(const std::string& value) {
  return value;
}
std::string text_of(const ShardingRules& rules) {
  return to_json(rules);
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

MetadataValues read_metadata(const GivenValue* file) {
  const ParsedMetadata environment = metadata_from_environment();
  ParsedMetadata parsed;
  if (file != nullptr) {
    if (file->text.empty()) throw ArgumentError(file->option, "''", "a name");
    parsed = as_option(fmt::format("{} {}", file->option, file->text), [&] {
      const std::string text = files::read_text(file->text);
      try {
        return parse_metadata(text, file->text);
      } catch (const ArgumentError& error) {  // names the key and the file
        throw UserError(fmt::format("{}: {}", file->option, error.what()));
      }
    });
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
