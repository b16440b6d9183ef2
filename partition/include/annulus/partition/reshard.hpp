#pragma once

#include <annulus/core/memory.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus {

/// Moves an array from one sharding to another (see plan_reshard): every rank sends to each other
/// rank just what that one lacks, in a single exchange; nothing is gathered anywhere. Extra memory:
/// what is sent and what is received, from `pool`.
///
/// `source` and `destination` are this rank's shards: of the local shapes that the shardings give
/// it, of one dtype, any strides, in host memory, not overlapping. Work submitted to `stream`
/// before the call is done before it reads; the destination is complete when it returns.
///
/// Collective over the mesh; all ranks give the same shardings and dtype. Bad views are agreed on:
/// every rank throws (a UserError, or as agree() says).
void reshard(Mesh& mesh, Stream& stream, MemoryPool& pool, const NamedSharding& from,
             const ConstTensorView& source, const NamedSharding& to, const TensorView& destination);

}  // namespace annulus
