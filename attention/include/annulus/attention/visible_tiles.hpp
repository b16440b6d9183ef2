#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// What rows cost a kernel that skips tiles without a visible pair: for each `chunk` query rows of
/// batches [batch, batch + batches), how many tiles of `tile` rows and `tile` keys hold one. In one
/// head, or summed over all heads if the mask depends on them. A ragged tile counts like a whole
/// one. `chunk` is a multiple of `tile`; T and S are below 2^28. Takes O(T + S + tiles in runs) for
/// every batch and head that the mask tells apart.
[[nodiscard]] std::vector<std::int64_t> visible_tiles(const AttentionProblem& problem,
                                                      std::int64_t batch, std::int64_t batches,
                                                      std::int64_t chunk, std::int64_t tile);

}  // namespace annulus
