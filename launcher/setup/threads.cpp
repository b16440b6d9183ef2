#include "launcher/setup/threads.hpp"

#include <annulus/mesh/cores.hpp>

namespace annulus::launcher {

int threads_per_rank(const Options& options, Mesh& mesh) {
  const int cores = cores_per_rank(mesh);
  return options.threads > 0 ? options.threads : cores;
}

}  // namespace annulus::launcher
