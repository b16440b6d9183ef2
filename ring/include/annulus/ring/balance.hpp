#pragma once

#include <cstdint>
#include <optional>

#include <annulus/attention/problem.hpp>
#include <annulus/partition/dealing.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus::ring {

/// The sequence layout `balanced`: positions dealt out by what the mask leaves of them. All of this
/// is pure and the same on every rank.

/// How many shards a sequence is dealt to, and in how many shards the batches lie beside that.
struct DealingShards {
  int sequence = 1;
  int batch = 1;
};

/// Deals the query rows out in chunks of a granule, so that ranks get the same number of visible
/// tiles (of 128 × 128, or of the granule if that is less) and of rows, up to a granule. Where
/// batches are sharded, the shards share one dealing, which does justice to all of them. Cuts are
/// preferably where little of a document or a window lies on both sides.
///
/// Without a granule: 128, halved until a rank gets 16 chunks; doubled while there are more than
/// 32768 chunks.
///
/// Throws ArgumentError for a granule below 1, UnsupportedError for 2^28 positions or more.
[[nodiscard]] Dealing deal_rows(const AttentionProblem& problem, const DealingShards& shards,
                                std::optional<std::int64_t> granule = {});
/// Deals the keys out by how many rows see them, for keys that lie otherwise than rows.
[[nodiscard]] Dealing deal_columns(const AttentionProblem& problem, const DealingShards& shards,
                                   std::optional<std::int64_t> granule = {});

/// Visible tiles of the rank with most of them, above the mean of all: 0.25 if it has 1.25 times
/// the mean. Tiles are those of deal_rows(), whole sequences of keys wide; a rank that holds some
/// rows of a tile has that share of it. Heads count alike. `query` is a sharding of [B,T,N,D]. 0
/// without visible tiles; nothing for 2^28 positions or more.
[[nodiscard]] std::optional<double> tile_imbalance(const AttentionProblem& problem,
                                                   const NamedSharding& query);

}  // namespace annulus::ring
