#include "json_object.hpp"

#include <utility>

#include <annulus/core/json_nesting.hpp>

namespace annulus::ring {

nlohmann::json parse_json_file(std::string_view text, const std::string& path) {
  if (nests_too_deep(text)) {
    throw FileError(path, fmt::format("has brackets more than {} deep", kMaximumJsonNesting));
  }
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    throw FileError(path, fmt::format("is not JSON (byte {})", error.byte));
  } catch (const nlohmann::json::out_of_range&) {
    throw FileError(path, "has a number beyond what float64 holds");
  }
}

JsonObject::JsonObject(const json& object, std::string where, const std::string& path)
    : object_(object), where_(std::move(where)), path_(path) {
  if (!object.is_object()) fail(where_.empty() ? "the file" : where_, "is not an object");
}

const nlohmann::json& JsonObject::at(const std::string& key) const {
  if (!has(key)) fail(name(key), "is missing");
  return object_.at(key);
}

std::string JsonObject::text(const std::string& key) const {
  const json& value = at(key);
  if (!value.is_string()) fail(name(key), fmt::format("is {}, expected a string", value.dump()));
  return value.get<std::string>();
}

bool JsonObject::flag(const std::string& key) const {
  const json& value = at(key);
  if (!value.is_boolean()) fail(name(key), fmt::format("is {}, expected a bool", value.dump()));
  return value.get<bool>();
}

double JsonObject::number(const std::string& key, double least, double most) const {
  const json& value = at(key);
  if (value.is_number() && value.get<double>() >= least && value.get<double>() <= most) {
    return value.get<double>();
  }
  fail(name(key), fmt::format("is {}, expected a number from {} to {}", value.dump(), least, most));
}

std::int64_t JsonObject::integer(const std::string& key, std::int64_t least,
                                 std::int64_t most) const {
  const json& value = at(key);
  // Numbers above int64 are unsigned.
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<std::uint64_t>() <= INT64_MAX) &&
                    value.get<std::int64_t>() >= least && value.get<std::int64_t>() <= most;
  if (fits) return value.get<std::int64_t>();
  fail(name(key),
       fmt::format("is {}, expected a whole number from {} to {}", value.dump(), least, most));
}

}  // namespace annulus::ring
