#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <annulus/core/tensor.hpp>
#include <annulus/partition/named_sharding.hpp>

/// Functions that run once on every rank, on local shards of arrays, as in JAX's shard_map: see
/// shard_map() of context.hpp.
namespace annulus {

/// A sharded array as one rank sees it: the sharding, and this rank's shard. Move-only.
class ShardedTensor {
 public:
  /// Throws ArgumentError unless `local` has the shape that `sharding` gives `rank`. Not
  /// collective.
  ShardedTensor(NamedSharding sharding, int rank, Tensor local);
  /// Takes memory for the shard from `pool`, uninitialised.
  ShardedTensor(NamedSharding sharding, int rank, DType dtype, MemoryPool& pool);

  [[nodiscard]] const NamedSharding& sharding() const noexcept { return sharding_; }
  [[nodiscard]] const Extents& global_shape() const noexcept { return sharding_.global_shape(); }
  [[nodiscard]] DType dtype() const noexcept { return local_.dtype(); }
  /// This rank's shard.
  [[nodiscard]] TensorView local() noexcept { return local_.view(); }
  [[nodiscard]] ConstTensorView local() const noexcept { return local_.view(); }

 private:
  NamedSharding sharding_;
  Tensor local_;
};

/// How one argument or result of shard_map() is sharded: a spec, and a distribution for each
/// dimension (missing trailing ones are blocks). A PartitionSpec converts implicitly.
struct ShardSpec {
  PartitionSpec spec;
  std::vector<Distribution> distributions;
  /// For a result: axes that the spec does not name, along which ranks have terms of a sum. The sum
  /// is made element by element in order of rank (row-major along these axes, first = major), in
  /// float32 at least, and rounded once. All ranks along these axes get it.
  AxisNames summed = {};
  /// For a summed result: a rank has any number of terms, which the body returns with an additional
  /// first dimension, in order. If the terms do not depend on the number of ranks, such as one term
  /// for each tile of a sequence in contiguous shards, the sum has the same bits on any number of
  /// ranks.
  bool stacked = false;

  ShardSpec(PartitionSpec partition, std::vector<Distribution> distribution = {})  // NOLINT
      : spec(std::move(partition)), distributions(std::move(distribution)) {}
};

/// Runs once on every rank: local shards in, local results out. The views are valid during the
/// call. GPU work must be on the stream of the call, or finished on return. Ranks that communicate
/// in the body do so in the same order.
using ShardBody = std::function<std::vector<Tensor>(std::span<const ConstTensorView> shards)>;

struct ShardMap {
  ShardBody body;
  std::vector<ShardSpec> in_specs;   ///< one per argument
  std::vector<ShardSpec> out_specs;  ///< one per result of the body
  /// Verifies that results are equal bit for bit along each axis that their spec does not name.
  bool check_replication = true;
};

/// Lvalues convert implicitly: shard_map(context, map, {query, key}).
using ShardedArguments = std::vector<std::reference_wrapper<const ShardedTensor>>;

/// The map of gradients of `map`. It takes the arguments of `map`, then the gradients of its
/// results, and returns the gradients of the arguments, each sharded like its argument.
///
/// `gradients` computes a rank's part from its own shards alone. If an argument is replicated along
/// an axis that other specs of the map name, ranks along it have used its copies for different
/// work, so its gradient is the sum of theirs (ShardSpec::summed). Along an axis that no spec
/// names, all ranks do the same work, and nothing is summed. A replicated result has one gradient,
/// which every rank gets whole. `stacked`: ShardSpec::stacked of the sums.
///
///     y = shard_map(context, map, {x, weight});
///     gradients = shard_map(context, transpose(map, body), {x, weight, grad_y});
[[nodiscard]] ShardMap transpose(const ShardMap& map, ShardBody gradients, bool stacked = false);

/// The sharding of a result, given its local shape on each rank of the mesh. Throws what
/// NamedSharding throws, and ArgumentError, naming `result` and a rank, if the local shapes cannot
/// be parts of one array.
[[nodiscard]] NamedSharding result_sharding(const MeshShape& mesh, const ShardSpec& spec,
                                            std::span<const Extents> local_shapes, int result);

}  // namespace annulus
