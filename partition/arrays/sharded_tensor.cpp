#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/partition/shard_map.hpp>

namespace annulus {

ShardedTensor::ShardedTensor(NamedSharding sharding, int rank, Tensor local)
    : sharding_(std::move(sharding)), local_(std::move(local)) {
  const Extents expected = sharding_.local_shape(rank);
  if (!(local_.shape() == expected)) {
    throw ArgumentError(
        "shard", "shape " + to_string(local_.shape()),
        fmt::format("{}, rank {}'s part of {}", to_string(expected), rank, to_string(sharding_)));
  }
}

ShardedTensor::ShardedTensor(NamedSharding sharding, int rank, DType dtype, MemoryPool& pool)
    : sharding_(std::move(sharding)), local_(dtype, sharding_.local_shape(rank), pool) {}

}  // namespace annulus
