#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <annulus/core/tensor.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus {

/// Entries that one rank copies out of its source shard, and where they go in the destination shard
/// of another: per dimension, shape[d] entries from local position begin[d] on, step[d] apart.
struct ReshardBox {
  Extents shape;
  Extents source_begin;
  Extents source_step;
  Extents destination_begin;
  Extents destination_step;
  bool operator==(const ReshardBox&) const = default;
};

/// What one rank of the mesh gives another (or itself). One message: its boxes one after the other,
/// each in row-major order.
struct ReshardTransfer {
  int source = 0;
  int destination = 0;
  std::vector<ReshardBox> boxes;  ///< not empty, and none of them empty
  [[nodiscard]] std::int64_t elements() const noexcept;
  bool operator==(const ReshardTransfer&) const = default;
};

/// Every element of every destination shard, fetched once. Ordered by destination.
struct ReshardPlan {
  std::vector<ReshardTransfer> transfers;
};

/// How to turn one sharding of an array into another. Where several ranks hold what a rank needs,
/// it takes it from itself if it can, otherwise from the one that has been asked for the fewest
/// elements so far (the lowest of them), which spreads the load and depends on nothing but the two
/// shardings. With `rank`, only the transfers that it takes part in. Throws ArgumentError unless
/// the shardings share global shape and mesh.
[[nodiscard]] ReshardPlan plan_reshard(const NamedSharding& from, const NamedSharding& to,
                                       std::optional<int> rank = std::nullopt);

}  // namespace annulus
