#pragma once

#include <annulus/mesh/mesh.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// CPU threads of this rank: --threads, else an even part of the cores that the ranks of the node
/// may use together. Collective over the mesh.
[[nodiscard]] int threads_per_rank(const Options& options, Mesh& mesh);

}  // namespace annulus::launcher
