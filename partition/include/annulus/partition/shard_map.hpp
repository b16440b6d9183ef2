#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <annulus/core/memory.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/partition/sharded_tensor.hpp>

namespace annulus {

/// How one argument or result of a shard_map is cut: a spec, and how its dimensions are dealt out
/// (missing trailing ones are blocks). A plain PartitionSpec converts.
struct ShardSpec {
  PartitionSpec spec;
  std::vector<Distribution> distributions;

  ShardSpec(PartitionSpec partition, std::vector<Distribution> distribution = {})  // NOLINT
      : spec(std::move(partition)), distributions(std::move(distribution)) {}
};

/// What runs once on every rank: local shards in, local results out. The views live for the call.
using ShardBody = std::function<std::vector<Tensor>(std::span<const ConstTensorView> shards)>;

struct ShardMap {
  ShardBody body;
  std::vector<ShardSpec> in_specs;   ///< one per argument
  std::vector<ShardSpec> out_specs;  ///< one per result of the body
  /// Verify that results are equal, bit for bit, along each axis that their spec does not name.
  bool check_replication = true;
};

/// Lvalues convert: shard_map(mesh, stream, pool, map, {query, key}).
using ShardedArguments = std::vector<std::reference_wrapper<const ShardedTensor>>;

/// Runs a function of whole arrays shard by shard, in the manner of JAX. Arguments that are not cut
/// as in_specs say are resharded first; results are labelled with out_specs, their global sizes
/// being the sums of the local ones along the axes of each dimension. (kv_heads cannot label a
/// result: how many heads are shared does not show in the shards.)
///
/// Collective over the mesh. The body may communicate through mesh.group(), in the same order on
/// every rank. Errors are agreed on, so that all ranks throw together: what a body throws; a number
/// of specs that is not that of the arguments or results; specs that do not fit
/// (partition_spec.hpp); local results that do not form a whole; results that differ where their
/// spec promises equality, naming result, axis and ranks.
[[nodiscard]] std::vector<ShardedTensor> shard_map(Mesh& mesh, Stream& stream, MemoryPool& pool,
                                                   const ShardMap& map,
                                                   const ShardedArguments& arguments);

/// The sharding of a result, from what each rank of the mesh holds of it. Throws as NamedSharding
/// does; ArgumentError, naming `result` and a rank, where the local shapes do not form a whole.
[[nodiscard]] NamedSharding result_sharding(const MeshShape& mesh, const ShardSpec& spec,
                                            std::span<const Extents> local_shapes, int result);

}  // namespace annulus
