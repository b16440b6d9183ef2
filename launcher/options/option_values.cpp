#include "launcher/options/option_values.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/ring/planner.hpp>

#include "launcher/options/nearest.hpp"
#include "launcher/report/number.hpp"

namespace annulus::launcher {
namespace {

// Products of larger sizes would not fit 63 bits.
constexpr std::int64_t kLargestSize = std::int64_t{1} << 48;
// This factor times the largest size still fits.
constexpr std::int64_t kLargestFactor = std::int64_t{1} << 14;

// "1e6", "2.5e5": whole numbers of at most kLargestSize, which a double holds exactly.
std::optional<std::int64_t> size_of_decimal(std::string_view text) {
  const auto number = number_of<double>(text);
  if (!number || !(*number >= 0 && *number <= static_cast<double>(kLargestSize))) {
    return std::nullopt;
  }
  if (*number != std::floor(*number)) return std::nullopt;
  return static_cast<std::int64_t>(*number);
}

std::optional<std::int64_t> size_of_text(std::string_view text) {
  if (text.find_first_of("eE") != std::string_view::npos) return size_of_decimal(text);
  std::int64_t unit = 1;
  if (!text.empty()) {
    if (text.back() == 'k' || text.back() == 'K') unit = std::int64_t{1} << 10;
    if (text.back() == 'M') unit = std::int64_t{1} << 20;
    if (text.back() == 'G') unit = std::int64_t{1} << 30;
    if (unit > 1) text.remove_suffix(1);
  }
  const auto number = number_of<std::int64_t>(text);
  if (!number || *number < 0 || *number > kLargestSize / unit) return std::nullopt;
  return *number * unit;
}

// A size that may be negative.
std::optional<std::int64_t> signed_size_of_text(std::string_view text) {
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  const auto size = size_of_text(text);
  // "--5" is not a number.
  if (!size || text.starts_with('-')) return std::nullopt;
  return negative ? -*size : *size;
}

std::string quoted(std::string_view text) {
  return fmt::format("'{}'", text);
}

bool names_array_file(std::string_view text) {
  return text.ends_with(".npy") || text.ends_with(".safetensors");
}

}  // namespace

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::vector<std::string> split_names(std::string_view text) {
  std::vector<std::string> names;
  for (const std::string_view name : split(text, ',')) {
    names.emplace_back(name.substr(std::min(name.find_first_not_of(' '), name.size())));
  }
  return names;
}

std::string parse_name(const std::string& option, std::string_view text) {
  if (text.empty()) throw ArgumentError(option, "''", "a name");
  return std::string(text);
}

std::string parse_array_name(const std::string& option, std::string_view text) {
  const bool has_digits = text.find_first_of("0123456789") != std::string_view::npos;
  if (has_digits && text.find_first_not_of("0123456789.,+-[] ") == std::string_view::npos) {
    throw ArgumentError(option, quoted(text),
                        fmt::format("a .npy or .safetensors file that holds the numbers (./{} if "
                                    "that is its name)",
                                    text));
  }
  return parse_name(option, text);
}

std::int64_t parse_integer(const std::string& option, std::string_view text, std::int64_t least,
                           std::int64_t most) {
  const auto number = number_of<std::int64_t>(text);
  if (number && *number >= least && *number <= most) return *number;
  throw ArgumentError(option, quoted(text),
                      fmt::format("a whole number from {} to {}", least, most));
}

std::int64_t parse_size(const std::string& option, std::string_view text) {
  const auto size = size_of_text(text);
  if (size && *size >= 1) return *size;
  throw ArgumentError(option, quoted(text), "a size of 1 or more, such as 4096, 64k, 80G or 1e6");
}

std::int64_t parse_bytes(const std::string& option, std::string_view text) {
  // "G" alone is 1024³, as in every size. With a "B", units have the meaning that vendors give
  // them.
  struct Unit {
    std::string_view name;
    double bytes;
  };
  constexpr std::array kUnits{Unit{"KiB", 0x1p10}, Unit{"MiB", 0x1p20}, Unit{"GiB", 0x1p30},
                              Unit{"TiB", 0x1p40}, Unit{"kB", 1e3},     Unit{"KB", 1e3},
                              Unit{"MB", 1e6},     Unit{"GB", 1e9},     Unit{"TB", 1e12}};
  for (const Unit& unit : kUnits) {
    if (!text.ends_with(unit.name)) continue;
    const auto number = number_of<double>(text.substr(0, text.size() - unit.name.size()));
    const double bytes = number.value_or(0) * unit.bytes;
    if (bytes >= 1 && bytes <= static_cast<double>(kLargestSize)) {
      return static_cast<std::int64_t>(bytes);
    }
  }
  if (const auto size = size_of_text(text); size && *size >= 1) return *size;
  throw ArgumentError(option, quoted(text),
                      "bytes, such as 80GB (80e9), 80GiB or 80G (80 * 1024^3)");
}

std::uint64_t parse_seed(const std::string& option, std::string_view text) {
  if (const auto seed = number_of<std::uint64_t>(text)) return *seed;
  throw ArgumentError(option, quoted(text), "a whole number from 0 to 2^64-1");
}

double parse_number(const std::string& option, std::string_view text) {
  const auto number = number_of<double>(text);
  if (number && std::isfinite(*number)) return *number;
  throw ArgumentError(option, quoted(text), "a finite number");
}

double parse_positive(const std::string& option, std::string_view text) {
  const auto number = number_of<double>(text);
  if (number && std::isfinite(*number) && *number > 0) return *number;
  throw ArgumentError(option, quoted(text), "a positive finite number");
}

std::optional<double> seconds_of_text(std::string_view text) {
  struct Unit {
    std::string_view name;
    double seconds;
  };
  // A longer name comes before one that it ends with.
  constexpr std::array kUnits{Unit{"ms", 1e-3}, Unit{"min", 60}, Unit{"s", 1}, Unit{"m", 60},
                              Unit{"h", 3600}};
  double unit = 1;
  for (const Unit& one : kUnits) {
    if (!text.ends_with(one.name)) continue;
    unit = one.seconds;
    text.remove_suffix(one.name.size());
    break;
  }
  const auto number = number_of<double>(text);
  const double seconds = number.value_or(0) * unit;
  if (!(seconds > 0) || !std::isfinite(seconds)) return std::nullopt;
  return seconds;
}

double parse_seconds(const std::string& option, std::string_view text) {
  if (const auto seconds = seconds_of_text(text)) return *seconds;
  throw ArgumentError(option, quoted(text), "a positive time, such as 300, 300s, 5m or 1.5h");
}

bool parse_flag(const std::string& option, std::string_view text) {
  for (const char* yes : {"true", "on", "yes", "1"}) {
    if (text == yes) return true;
  }
  for (const char* no : {"false", "off", "no", "0"}) {
    if (text == no) return false;
  }
  throw ArgumentError(option, quoted(text), "true or false");
}

std::string parse_choice(const std::string& option, std::string_view text,
                         const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), text) != choices.end()) return std::string(text);
  throw ArgumentError(
      option, quoted(text),
      fmt::format("one of {}{}", fmt::join(choices, ", "), nearest_hint(text, "", choices)));
}

DType parse_dtype_choice(const std::string& option, std::string_view text,
                         const std::vector<DType>& choices) {
  std::vector<std::string> names;
  names.reserve(choices.size());
  for (const DType dtype : choices) names.emplace_back(annulus::name_of(dtype));
  std::string name(text);
  try {
    name = annulus::name_of(annulus::parse_dtype(text));
  } catch (const ArgumentError&) {
    // parse_choice() says what the option takes.
  }
  return annulus::parse_dtype(parse_choice(option, name, names));
}

AttentionShape parse_shape(const std::string& option, std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ',');
  std::vector<std::int64_t> sizes;
  for (const std::string_view part : parts) {
    const auto size = size_of_text(part);
    if (!size) break;
    sizes.push_back(*size);
  }
  if (sizes.size() != parts.size() || sizes.size() < 6 || sizes.size() > 7) {
    throw ArgumentError(option, quoted(text),
                        "B,T,S,N,K,D or B,T,S,N,K,D,Dv, each a size such as 4, 64k, 1M, 2G or 1e6");
  }
  AttentionShape shape{sizes[0],
                       sizes[1],
                       sizes[2],
                       sizes[3],
                       sizes[4],
                       sizes[5],
                       sizes.size() == 7 ? sizes[6] : sizes[5]};
  if (shape.heads < 1 || shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0) {
    throw ArgumentError(option, quoted(text), "N and K of 1 or more, N a multiple of K");
  }
  if (shape.head_dim < 1 || shape.value_dim < 1) {
    throw ArgumentError(option, quoted(text), "D and Dv of 1 or more");
  }
  return shape;
}

WindowSize parse_window(const std::string& option, std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ',');
  const auto left = signed_size_of_text(parts.front());
  const auto right = signed_size_of_text(parts.back());
  const auto valid = [](const std::optional<std::int64_t>& size) { return size && *size >= -1; };
  if (parts.size() > 2 || !valid(left) || !valid(right)) {
    throw ArgumentError(option, quoted(text),
                        "L,R (or one number for both), each 0 or more, or -1 for no limit");
  }
  return {*left, *right};
}

BlockSize parse_block_size(const std::string& option, std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ',');
  const auto query = size_of_text(parts.front());
  const auto kv = size_of_text(parts.back());
  if (parts.size() > 2 || query.value_or(0) < 1 || kv.value_or(0) < 1) {
    throw ArgumentError(option, quoted(text), "Q,K (or one number for both), each 1 or more");
  }
  return {*query, *kv};
}

CausalOffset parse_causal_offset(const std::string& option, std::string_view text) {
  CausalOffset offset;
  offset.bottom_right = text == "bottom-right";
  offset.top_left = text == "top-left";
  if (offset.bottom_right || offset.top_left) return offset;
  if (const auto value = signed_size_of_text(text)) {
    offset.value = *value;
  } else if (names_array_file(text)) {
    offset.file = text;
  } else {
    throw ArgumentError(
        option, quoted(text),
        "a whole number or bottom-right (or top-left, or a .npy or .safetensors file with one "
        "number for each batch)");
  }
  return offset;
}

SizeOrFile parse_size_or_file(const std::string& option, std::string_view text) {
  if (const auto size = size_of_text(text)) return {*size, {}};
  if (names_array_file(text)) return {0, std::string(text)};
  throw ArgumentError(option, quoted(text),
                      "a number of 0 or more, or a .npy or .safetensors file with one for each "
                      "batch");
}

SweepRange parse_sweep(const std::string& option, std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ':');
  SweepRange range;
  if (parts.size() == 2 || parts.size() == 3) {
    const auto begin = size_of_text(parts[0]);
    const auto end = size_of_text(parts[1]);
    const auto factor = parts.size() == 3 ? number_of<std::int64_t>(parts[2]) : range.factor;
    if (begin && end && factor && *begin >= 1 && *begin <= *end && *factor >= 2 &&
        *factor <= kLargestFactor) {
      return {*begin, *end, *factor};
    }
  }
  throw ArgumentError(
      option, quoted(text),
      fmt::format("BEGIN:END or BEGIN:END:FACTOR with 1 <= BEGIN <= END and FACTOR from 2 "
                  "to {}",
                  kLargestFactor));
}

RandomCase parse_random_case(const std::string& option, std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ':');
  if (parts.size() == 2) {
    const auto seed = number_of<std::uint64_t>(parts[0]);
    const auto index = number_of<int>(parts[1]);
    if (seed && index && *index >= 0) return {*seed, *index};
  }
  throw ArgumentError(option, quoted(text), "SEED:INDEX, two whole numbers of 0 or more");
}

std::string parse_spec(const std::string& option, const std::string& text) {
  try {
    static_cast<void>(PartitionSpec::parse(text, option));
  } catch (const DuplicateSpecError& error) {
    throw UserError(fmt::format("{}: {}", option, error.what()));
  }
  return text;
}

std::string parse_schedule_name(const std::string& option, const std::string& text) {
  if (text == "auto") return text;
  try {
    static_cast<void>(ring::parse_schedule(text));
  } catch (const ArgumentError& error) {
    const std::string nearest = nearest_hint(text, "", split_names(error.expected()));
    throw ArgumentError(option, error.value(), error.expected() + nearest);
  }
  return text;
}

std::string parse_implementation_name(const std::string& option, const std::string& text) {
  if (text == "auto") return text;
  const Registry registry = Registry::standard();
  try {
    registry.check_name(text);
  } catch (const ArgumentError& error) {
    throw ArgumentError(option, fmt::format("'{}'", text),
                        error.expected() + nearest_hint(text, "", registry.names()));
  }
  return text;
}

}  // namespace annulus::launcher
