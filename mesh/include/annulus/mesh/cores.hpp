#pragma once

#include <annulus/mesh/mesh.hpp>

namespace annulus {

/// CPU threads that suit a rank: an even part of the cores that the ranks of its node may use
/// together, at least 1 and at most those that it may use itself. Collective over the mesh.
[[nodiscard]] int cores_per_rank(Mesh& mesh);

}  // namespace annulus
