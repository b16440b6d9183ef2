#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// The cost of rows in a kernel that skips tiles without a visible pair: for each chunk of `chunk`
/// query rows, the number of tiles of `tile` rows and `tile` keys that have a visible pair, summed
/// over batches [batch, batch + batches). Counts one head, or all heads if the mask depends on
/// them. A partial tile counts as a whole one. `chunk` is a multiple of `tile`; T and S are below
/// 2^28. Costs O(T + S + runs of tiles) for every batch and head that the mask treats differently.
[[nodiscard]] std::vector<std::int64_t> visible_tiles(const AttentionProblem& problem,
                                                      std::int64_t batch, std::int64_t batches,
                                                      std::int64_t chunk, std::int64_t tile);

}  // namespace annulus
