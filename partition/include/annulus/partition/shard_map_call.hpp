#pragma once

#include <vector>

#include <annulus/core/device.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/shard_map.hpp>

namespace annulus {

/// shard_map() of context.hpp, on any mesh and device. GPU work of the body must be on `stream`,
/// which the call waits for, or finished on return. The body may communicate through mesh.group(), in the same order on every
/// rank.
[[nodiscard]] std::vector<ShardedTensor> shard_map(Mesh& mesh, Device& device, Stream& stream,
                                                   const ShardMap& map,
                                                   const ShardedArguments& arguments);

}  // namespace annulus
