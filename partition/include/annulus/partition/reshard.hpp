#pragma once

#include <annulus/core/device.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus {

/// Moves an array from one sharding to another. In a single exchange, each rank sends every other
/// rank exactly the elements that this other rank lacks (see plan_reshard); no rank ever holds the
/// whole array. Takes device memory for what this rank sends and receives.
///
/// `source` and `destination` are this rank's shards: they must have the local shapes of the
/// shardings, the same dtype and any strides, lie in the device's memory and not overlap. The call
/// reads the source after earlier work of `stream`, and returns when the destination is complete.
/// GPUs exchange data by the transport that Mesh::group() finds best.
///
/// Collective over the mesh; all ranks pass the same shardings and dtype, and either all or none
/// pass a GPU. If the views or the device of one rank do not fit, every rank throws a UserError.
void reshard(Mesh& mesh, Device& device, Stream& stream, const NamedSharding& from,
             const ConstTensorView& source, const NamedSharding& to, const TensorView& destination);

}  // namespace annulus
