#pragma once

#include <annulus/mesh/mesh.hpp>

namespace annulus {

/// CPU threads of this rank: as many as `wanted`, or if that is 0 as suit it, which is an even part
/// of the cores that the ranks of its machine may use together, at least 1 and at most those that
/// it may use itself. Collective over the mesh, whatever ranks want.
[[nodiscard]] int threads_per_rank(Mesh& mesh, int wanted);

}  // namespace annulus
