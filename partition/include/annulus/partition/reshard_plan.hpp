#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <annulus/core/tensor.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus {

/// Entries of one rank's source shard and their place in another rank's destination shard. In each
/// dimension d, there are shape[d] entries, starting at local position begin[d], step[d] apart.
struct ReshardBox {
  Extents shape;
  Extents source_begin;
  Extents source_step;
  Extents destination_begin;
  Extents destination_step;
  bool operator==(const ReshardBox&) const = default;
};

/// The data that one rank of the mesh sends to another, or keeps. The message holds the boxes one
/// after the other, each in row-major order.
struct ReshardTransfer {
  int source = 0;
  int destination = 0;
  std::vector<ReshardBox> boxes;  ///< at least one; no box is empty
  [[nodiscard]] std::int64_t elements() const noexcept;
  bool operator==(const ReshardTransfer&) const = default;
};

/// Transfers that deliver every element of every destination shard once, in order of destination.
struct ReshardPlan {
  std::vector<ReshardTransfer> transfers;
};

/// The transfers that turn one sharding of an array into another. A rank takes what it already
/// holds from itself. If several other ranks hold it, the one with the fewest elements to send so
/// far is chosen (the lowest of equals), which spreads the load. The result depends only on the two
/// shardings. If `rank` is given, it contains only the transfers of that rank. Throws ArgumentError
/// unless both shardings have the same global shape and mesh.
[[nodiscard]] ReshardPlan plan_reshard(const NamedSharding& from, const NamedSharding& to,
                                       std::optional<int> rank = std::nullopt);

}  // namespace annulus
