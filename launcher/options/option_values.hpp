#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/attention/problem.hpp>

#include "launcher/options/options.hpp"

/// Readers of option values. Each throws ArgumentError(option, text, what it expected). Sizes may
/// come as "1500", "64k", "1M", "2G" or "1e6": k is 1024, M 1024², G 1024³, and e6 a million.
namespace annulus::launcher {

/// A name that is not empty.
[[nodiscard]] std::string parse_name(const std::string& option, std::string_view text);
/// The name of a file with an array; numbers, as in "700,800", are refused.
[[nodiscard]] std::string parse_array_name(const std::string& option, std::string_view text);
/// A whole number from `least` to `most`, without suffixes.
[[nodiscard]] std::int64_t parse_integer(const std::string& option, std::string_view text,
                                         std::int64_t least, std::int64_t most);
/// A size of 1 or more.
[[nodiscard]] std::int64_t parse_size(const std::string& option, std::string_view text);
/// Bytes, 1 or more: a size, or a number with a unit, "80GB" (80e9) or "80GiB" (80 * 1024³).
[[nodiscard]] std::int64_t parse_bytes(const std::string& option, std::string_view text);
[[nodiscard]] std::uint64_t parse_seed(const std::string& option, std::string_view text);
/// A finite number.
[[nodiscard]] double parse_number(const std::string& option, std::string_view text);
[[nodiscard]] double parse_positive(const std::string& option, std::string_view text);
/// Positive seconds: "300", "90s", "5m" or "5min", "1.5h", "200ms".
[[nodiscard]] double parse_seconds(const std::string& option, std::string_view text);
/// The same without an error: absent if the text is no positive time.
[[nodiscard]] std::optional<double> seconds_of_text(std::string_view text);
/// "true", "on", "yes", "1" or "false", "off", "no", "0".
[[nodiscard]] bool parse_flag(const std::string& option, std::string_view text);
/// One of a few words; the error names the nearest of them.
[[nodiscard]] std::string parse_choice(const std::string& option, std::string_view text,
                                       const std::vector<std::string>& choices);

/// One of a few dtypes, by its name or a short one (see annulus::parse_dtype).
[[nodiscard]] DType parse_dtype_choice(const std::string& option, std::string_view text,
                                       const std::vector<DType>& choices);

/// "B,T,S,N,K,D[,Dv]"; Dv is D by default.
[[nodiscard]] AttentionShape parse_shape(const std::string& option, std::string_view text);
/// "L,R"; "w" means w,w. Each −1 or a size.
[[nodiscard]] WindowSize parse_window(const std::string& option, std::string_view text);
/// "Q,K"; "w" means w,w. Each a size of 1 or more.
[[nodiscard]] BlockSize parse_block_size(const std::string& option, std::string_view text);
/// A size, which may be negative, "top-left", "bottom-right" or a .npy or .safetensors file.
[[nodiscard]] CausalOffset parse_causal_offset(const std::string& option, std::string_view text);
/// A size of 0 or more, or a .npy or .safetensors file.
[[nodiscard]] SizeOrFile parse_size_or_file(const std::string& option, std::string_view text);
/// "BEGIN:END[:FACTOR]".
[[nodiscard]] SweepRange parse_sweep(const std::string& option, std::string_view text);
/// "SEED:INDEX".
[[nodiscard]] RandomCase parse_random_case(const std::string& option, std::string_view text);

/// A PartitionSpec that can be parsed, as its text.
[[nodiscard]] std::string parse_spec(const std::string& option, const std::string& text);
/// A name, or "auto"; the error names the nearest name.
[[nodiscard]] std::string parse_schedule_name(const std::string& option, const std::string& text);
[[nodiscard]] std::string parse_implementation_name(const std::string& option,
                                                    const std::string& text);

/// The names in "a, b".
[[nodiscard]] std::vector<std::string> split_names(std::string_view text);

/// The parts between separators: "a,,b" gives three parts, "" one.
[[nodiscard]] std::vector<std::string_view> split(std::string_view text, char separator);

}  // namespace annulus::launcher
