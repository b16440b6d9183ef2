#pragma once

#include <annulus/mesh/mesh.hpp>

namespace annulus {

/// CPU threads of this rank: `wanted`, or, if that is 0, an equal share of the cores that the ranks
/// of its machine may use together, at least 1 and at most the cores that the rank itself may use.
/// Collective over the mesh, for any `wanted`.
[[nodiscard]] int threads_per_rank(Mesh& mesh, int wanted);

}  // namespace annulus
