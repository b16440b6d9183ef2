#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/core/json_nesting.hpp>
#include <annulus/ring/metadata.hpp>

#include "face/metadata/fields.hpp"

namespace annulus {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kPrefix = "ANNULUS_METADATA_";
constexpr const char* kAllModes = "all";

/// Thrown for a value that its field does not accept.
struct Unexpected {
  std::string expected;
  std::string entry = {};  // the part of the field that is wrong, "head.train"; empty: all of it
  std::string value = {};  // of the entry
};

// Writing.

template <class T>
Json json_of(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return name_of(value);
  } else {
    return value;
  }
}
Json json_of(const ShardingRules& rules) {
  Json json = Json::object();
  for (const ShardingRule& rule : rules.rules()) {
    Json& axis = json[std::string(name_of(rule.axis))];
    axis[rule.mode ? std::string(name_of(*rule.mode)) : kAllModes] =
        rule.axes.empty() ? Json() : Json(rule.axes);
  }
  return json;
}
template <class T>
Json json_of(const std::optional<T>& value) {
  return value ? json_of(*value) : Json();
}

// Reading.

using UnknownKey = UnknownMetadataKey;

/// The source of a value, for messages, and the unknown keys so far.
struct Reader {
  std::string key;  // of the field; empty for sharding rules alone
  const std::string& source;
  std::vector<UnknownKey>& unknown;

  /// Returns the path of an entry of the field, or of the field if `entry` is empty.
  [[nodiscard]] std::string path_of(const std::string& entry) const {
    return key.empty() || entry.empty() ? key + entry : fmt::format("{}.{}", key, entry);
  }
  [[nodiscard]] std::string shown(const std::string& entry = {}) const {
    return fmt::format("{} in {}", path_of(entry), source);
  }
  void add_unknown(std::string name, std::string known) const {
    unknown.push_back({std::move(name), std::move(known)});
  }
};

std::vector<std::string> warnings_of(const std::vector<UnknownKey>& keys,
                                     const std::string& source) {
  std::vector<std::string> warnings;
  for (const UnknownKey& key : keys) {
    warnings.push_back(fmt::format("{}: unknown key '{}' is ignored; known keys are {}", source,
                                   key.name, key.known));
  }
  return warnings;
}

const std::string& text_of(const Json& json, const char* expected) {
  if (!json.is_string()) throw Unexpected{expected};
  return json.get_ref<const std::string&>();
}

template <class Parse>
auto known(const Parse& parse, const std::string& name) -> std::optional<decltype(parse(name))> {
  try {
    return parse(name);
  } catch (const ArgumentError&) {
    return std::nullopt;
  }
}

// The value that a string names; throws Unexpected unless it is a string that parse() knows.
template <class Parse>
auto named(const Json& json, const Parse& parse, const char* expected) {
  const auto value = known(parse, text_of(json, expected));
  if (!value) throw Unexpected{expected};
  return *value;
}

void read(const Reader& /*reader*/, const Json& json, bool& value) {
  if (!json.is_boolean()) throw Unexpected{"true or false"};
  value = json.get<bool>();
}
void read(const Reader& /*reader*/, const Json& json, double& value) {
  if (!json.is_number()) throw Unexpected{"a number"};
  value = json.get<double>();
}
template <class Integer>
requires(std::is_integral_v<Integer> &&
         !std::is_same_v<Integer, bool>) void read(const Reader& /*reader*/, const Json& json,
                                                   Integer& value) {
  const bool fits =
      json.is_number_unsigned()
          ? json.get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<Integer>::max()}
          : json.is_number_integer() && std::is_signed_v<Integer>;
  if (!fits)
    throw Unexpected{std::is_signed_v<Integer> ? "a whole number" : "a whole number, 0 or more"};
  value = json.get<Integer>();
}
void read(const Reader& /*reader*/, const Json& json, std::string& value) {
  value = text_of(json, "a string");
}
void read(const Reader& /*reader*/, const Json& json, DType& value) {
  value = named(json, parse_dtype, "the name of a dtype, such as float32 or bfloat16");
}
void read(const Reader& /*reader*/, const Json& json, Backend& value) {
  value = named(json, parse_backend, "auto, cpu or cuda");
}
void read(const Reader& /*reader*/, const Json& json, AttentionMode& value) {
  value = named(json, parse_attention_mode, "train, prefill, autoregressive or insert");
}

AxisNames axes_of(const Json& json) {
  constexpr const char* kExpected =
      "a mesh axis such as \"tp\", a list of mesh axes, null for none, or an object with such "
      "an entry for each mode";
  if (json.is_null()) return {};
  AxisNames axes;
  for (const Json& name : json.is_array() ? json : Json::array({json})) {
    axes.push_back(text_of(name, kExpected));
    if (axes.back().empty()) throw Unexpected{kExpected};
  }
  return axes;
}

// The value of an environment variable need not be UTF-8.
std::string shown(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

AxisNames axes_of(const Json& json, const std::string& entry) {
  try {
    return axes_of(json);
  } catch (const Unexpected& unexpected) {
    throw Unexpected{unexpected.expected, entry, shown(json)};
  }
}

void read_rule(const Reader& reader, const Json& json, SemanticAxis axis, ShardingRules& rules) {
  const std::string entry(name_of(axis));
  if (!json.is_object()) return rules.set({axis, std::nullopt, axes_of(json, entry)});
  for (const auto& [name, axes] : json.items()) {
    const std::string of_mode = fmt::format("{}.{}", entry, name);
    if (name == kAllModes) {
      rules.set({axis, std::nullopt, axes_of(axes, of_mode)});
    } else if (const auto mode = known(parse_attention_mode, name)) {
      rules.set({axis, mode, axes_of(axes, of_mode)});
    } else {
      reader.add_unknown(reader.path_of(of_mode), "all, train, prefill, autoregressive, insert");
    }
  }
}

void read(const Reader& reader, const Json& json, ShardingRules& value) {
  if (!json.is_object()) throw Unexpected{"an object of semantic axes, such as {\"head\": \"tp\"}"};
  value = {};
  for (const auto& [name, rule] : json.items()) {
    if (const auto axis = known(parse_semantic_axis, name)) {
      read_rule(reader, rule, *axis, value);
      continue;
    }
    std::string names;
    for (const SemanticAxis axis : kSemanticAxes) {
      names += (names.empty() ? "" : ", ") + std::string(name_of(axis));
    }
    reader.add_unknown(reader.path_of(name), names);
  }
}

template <class T>
void read(const Reader& reader, const Json& json, std::optional<T>& value) {
  if (json.is_null()) {
    value.reset();
    return;
  }
  T given{};
  try {
    read(reader, json, given);
  } catch (const Unexpected& unexpected) {
    throw Unexpected{unexpected.expected + ", or null", unexpected.entry, unexpected.value};
  }
  value = std::move(given);
}

std::string known_keys() {
  std::string keys;
  for_each_metadata_field([&](const char* key, auto /*value*/, auto /*given*/) {
    keys += (keys.empty() ? "" : ", ") + std::string(key);
  });
  return keys;
}

// Sets the field called `reader.key` and checks it; false if there is none.
bool set_field(const Reader& reader, const Json& json, MetadataFields& fields) {
  bool found = false;
  for_each_metadata_field([&](const char* key, auto /*value*/, auto given) {
    if (reader.key != key) return;
    found = true;
    MetadataFields alone;
    try {
      read(reader, json, (alone.*given).emplace());
      static_cast<void>(AttentionMetadata().replace(alone));
    } catch (const Unexpected& unexpected) {
      throw ArgumentError(reader.shown(unexpected.entry),
                          unexpected.entry.empty() ? shown(json) : unexpected.value,
                          unexpected.expected);
    } catch (const ArgumentError& error) {
      throw ArgumentError(reader.shown(), error.value(), error.expected());
    }
    fields.*given = std::move(alone.*given);
  });
  return found;
}

// Refuses repeated keys, of which the parser would silently keep one, and keeps the path to the
// value that is being parsed, for messages.
class Keys {
 public:
  /// `source` must outlive it. Copies, which the parser makes, share `path`.
  Keys(const std::string& source, std::vector<std::string>& path) : source_(source), path_(path) {}
  bool operator()(int /*depth*/, Json::parse_event_t event, const Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
        keys_.emplace_back();
        path_.emplace_back();
        break;
      case Json::parse_event_t::object_end:
        keys_.pop_back();
        path_.pop_back();
        break;
      case Json::parse_event_t::key:
        if (!keys_.back().insert(parsed.get<std::string>()).second) {
          throw ArgumentError(fmt::format("{} in {}", parsed.get<std::string>(), source_),
                              "the key twice", "it once");
        }
        path_.back() = parsed.get<std::string>();
        break;
      default:
        break;
    }
    return true;
  }

 private:
  const std::string& source_;
  std::vector<std::string>& path_;  // the key at each depth
  std::vector<std::set<std::string>> keys_;
};

// Throws ArgumentError for keys that are repeated and numbers that float64 cannot hold, and
// Json::exception for what is not JSON.
Json parse(std::string_view text, const std::string& source) {
  std::vector<std::string> path;
  try {
    return Json::parse(text, Keys(source, path));
  } catch (const Json::out_of_range&) {
    throw ArgumentError(
        path.empty() ? source : fmt::format("{} in {}", fmt::join(path, "."), source),
        "a number beyond float64's range", "one of at most 1.8e308 in magnitude");
  }
}

// "line 2, column 5: '}'", where the parser stopped after `bytes` bytes.
std::string found_at(std::string_view text, std::size_t bytes) {
  const std::size_t at = bytes == 0 ? 0 : bytes - 1;
  if (at >= text.size()) return "it ends in the middle of a value";
  const std::string_view before = text.substr(0, at);
  const auto line = std::count(before.begin(), before.end(), '\n');
  const std::size_t begin =
      before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  const auto c = static_cast<unsigned char>(text[at]);
  const bool prints = c > ' ' && c < 0x7f;
  return fmt::format("line {}, column {}: {} is not expected here", line + 1, at - begin + 1,
                     prints ? fmt::format("'{}'", text[at]) : fmt::format("byte {:#04x}", c));
}

std::string lower_case(std::string text) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

// A value that is not JSON is taken as a string without quotes.
Json parse_variable(const std::string& text) {
  if (nests_too_deep(text)) return text;
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_discarded() ? Json(text) : json;
}

}  // namespace

std::string to_json(const AttentionMetadata& metadata) {
  metadata.validate();
  Json json = Json::object();
  for_each_metadata_field(
      [&](const char* key, auto value, auto /*given*/) { json[key] = json_of(metadata.*value); });
  try {
    return json.dump(2);
  } catch (const Json::exception&) {
    throw ArgumentError("metadata", "a name that is not UTF-8", "UTF-8 text");
  }
}

ParsedMetadata parse_metadata(std::string_view text, const std::string& source) {
  if (nests_too_deep(text)) {
    throw FileError(source, fmt::format("has brackets more than {} deep", kMaximumJsonNesting));
  }
  Json json;
  try {
    json = parse(text, source);
  } catch (const Json::parse_error& error) {
    throw FileError(source, "is not JSON: " + found_at(text, error.byte));
  }
  if (!json.is_object()) throw FileError(source, "is not a JSON object");
  ParsedMetadata parsed;
  for (const auto& [key, value] : json.items()) {
    const Reader reader{key, source, parsed.unknown};
    if (!set_field(reader, value, parsed.fields)) reader.add_unknown(key, known_keys());
  }
  parsed.warnings = warnings_of(parsed.unknown, source);
  return parsed;
}

std::string to_json(const ShardingRules& rules) {
  return json_of(rules).dump(-1, ' ', false, Json::error_handler_t::replace);
}

ShardingRules parse_sharding_rules(std::string_view text, const std::string& source) {
  std::vector<UnknownKey> unknown;
  ShardingRules rules;
  const Reader reader{"", source, unknown};
  const auto refuse = [&](const std::string& expected) {
    throw ArgumentError(source, fmt::format("'{}'", text), expected);
  };
  const auto refuse_entry = [&](const std::string& entry, const std::string& value,
                                const std::string& expected) {
    throw ArgumentError(fmt::format("{}, entry '{}'", source, entry), value, expected);
  };
  constexpr const char* kObject =
      "JSON text (not a file), an object of the mesh axes for each semantic axis, such as "
      "{\"head\": \"tp\", \"batch\": [\"fsdp\", \"dp\"]}";
  if (nests_too_deep(text)) refuse(fmt::format("brackets at most {} deep", kMaximumJsonNesting));
  try {
    read(reader, parse(text, source), rules);
  } catch (const Unexpected& unexpected) {
    if (unexpected.entry.empty()) refuse(kObject);
    refuse_entry(unexpected.entry, unexpected.value, unexpected.expected);
  } catch (const Json::exception&) {
    refuse(kObject);
  }
  if (!unknown.empty()) {
    refuse_entry(unknown.front().name, "an unknown name", "one of " + unknown.front().known);
  }
  return rules;
}

ParsedMetadata metadata_from_environment() {
  std::map<std::string, std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    const std::size_t equals = text.find('=');
    if (!text.starts_with(kPrefix) || equals == std::string_view::npos) continue;
    if (equals + 1 < text.size())
      variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  ParsedMetadata parsed;
  const std::string source = "the environment";
  for (const auto& [name, text] : variables) {
    const std::string key = lower_case(name.substr(kPrefix.size()));
    const Reader reader{key, source, parsed.unknown};
    try {
      if (set_field(reader, parse_variable(text), parsed.fields)) continue;
    } catch (const ArgumentError& error) {
      throw ArgumentError(name, error.value(), error.expected());
    }
    reader.add_unknown(name, known_keys());
  }
  parsed.warnings = warnings_of(parsed.unknown, source);
  return parsed;
}

}  // namespace annulus
