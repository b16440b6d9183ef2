#pragma once

#include <string>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/core/json_nesting.hpp>

namespace annulus::ring {

/// The JSON of a file. Throws FileError, naming `path`, if `text` is not JSON, nests too deeply or
/// has a number that float64 cannot hold.
[[nodiscard]] inline nlohmann::json parse_json_file(std::string_view text,
                                                    const std::string& path) {
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

}  // namespace annulus::ring
