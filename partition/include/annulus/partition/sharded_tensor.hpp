#pragma once

#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus {

/// A sharded array as one rank sees it: the sharding, and this rank's shard. Move-only.
class ShardedTensor {
 public:
  /// Throws ArgumentError unless `local` has the shape that `sharding` gives `rank`. Not
  /// collective.
  ShardedTensor(NamedSharding sharding, int rank, Tensor local);
  /// The shard comes from `pool`, uninitialised.
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

}  // namespace annulus
