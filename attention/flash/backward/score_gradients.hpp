#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"

// The memory for dS of wide heads, see ScoreGradients.
namespace annulus::flash::backward {

/// Bytes that dS takes at most. Tests make it smaller.
inline std::int64_t score_gradient_bytes = std::int64_t{1} << 30;

/// Divides a call into parts. The dS of a part takes at most `most_bytes`, which must hold four
/// tiles. `arguments` has its lengths, batches and heads. A query tile sees at most `seen_tiles`
/// key tiles.
[[nodiscard]] ScoreGradients divide_into_parts(const Arguments& arguments, std::int64_t seen_tiles,
                                               std::int64_t most_bytes);

/// Bytes of a part's dS.
[[nodiscard]] std::int64_t bytes_of(const ScoreGradients& parts);

}  // namespace annulus::flash::backward
