#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"

// The memory for dS of wide heads, see ScoreGradients.
namespace annulus::flash::backward {

/// Bytes that dS takes at most, unless a part would have few query tiles. Tests make it smaller.
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
inline std::int64_t score_gradient_bytes = std::int64_t{1} << 30;

/// Divides a call into parts. `arguments` has its lengths, batches and heads. A query tile sees
/// `key_tiles` at most. Without `query_wanted`, there is one part, and it takes no memory.
[[nodiscard]] ScoreGradients divide_into_parts(const Arguments& arguments, std::int64_t key_tiles,
                                               bool query_wanted);

/// Bytes for dS of the parts of a call.
[[nodiscard]] std::int64_t bytes_for(const Arguments& arguments, const ScoreGradients& parts);

}  // namespace annulus::flash::backward
