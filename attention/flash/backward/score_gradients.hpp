#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"

// The memory for dS of wide heads, see ScoreGradients.
namespace annulus::flash::backward {

/// Bytes that dS takes at most. Tests make it smaller.
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
inline std::int64_t score_gradient_bytes = std::int64_t{1} << 30;

/// Divides a call into parts, whose dS has at most this many bytes, of at least four tiles.
/// `arguments` has its lengths, batches and heads. A query tile sees `seen_tiles` at most.
[[nodiscard]] ScoreGradients divide_into_parts(const Arguments& arguments, std::int64_t seen_tiles,
                                               std::int64_t most_bytes);

/// Bytes of a part's dS.
[[nodiscard]] std::int64_t bytes_of(const ScoreGradients& parts);

}  // namespace annulus::flash::backward
