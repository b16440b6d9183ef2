#pragma once

#include <cstdint>
#include <optional>

#include <annulus/attention/problem.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus::ring {

/// The sequence layout `balanced` assigns positions by their work under the mask. All functions
/// here are pure and give the same result on every rank.

/// The number of shards that a sequence is cut into, and the number of shards of the batches.
struct AssignmentShards {
  int sequence = 1;
  int batch = 1;
};

/// Assigns the query rows in chunks of a granule, so that ranks get the same number of visible
/// tiles (of 128 × 128, or smaller if the granule is) and the same number of rows, to within a
/// granule. If batches are sharded, all batch shards share one assignment, which balances the work
/// of each. Cuts are preferably made where few keys are seen from the other side.
///
/// The default granule is 128, halved until a rank gets 8 chunks, or doubled while there are more
/// than 32768 chunks.
///
/// Throws ArgumentError for a granule below 1 or one that makes more than 32768 chunks, and
/// UnsupportedError for 2^28 positions or more. An unsharded sequence is not cut.
[[nodiscard]] Assignment assign_rows(const AttentionProblem& problem,
                                     const AssignmentShards& shards,
                                     std::optional<std::int64_t> granule = {});
/// Assigns the keys by the number of rows that see them, for keys that are not laid out like the
/// rows.
[[nodiscard]] Assignment assign_columns(const AttentionProblem& problem,
                                        const AssignmentShards& shards,
                                        std::optional<std::int64_t> granule = {});

/// The excess of the rank with most visible tiles over the mean of all ranks: 0.25 for 1.25 times
/// the mean. Tiles are as in assign_rows(), over all keys. A rank that holds some rows of a chunk
/// counts that share of its tiles. Sharding of the heads is ignored. `query` is a sharding of
/// [B,T,N,D]. Returns 0 if there are no visible tiles, and nothing for 2^28 positions or more.
[[nodiscard]] std::optional<double> tile_imbalance(const AttentionProblem& problem,
                                                   const NamedSharding& query);

}  // namespace annulus::ring
