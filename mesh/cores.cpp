#include <algorithm>
#include <cstddef>
#include <sched.h>
#include <string>
#include <vector>

#include <annulus/mesh/cores.hpp>

namespace annulus {
namespace {

// The cores that this process may run on, one character per core: '1' or '0'.
std::string allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // The call fails where there are more cores than a cpu_set_t holds; the rank then counts one.
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return "1";
  std::string cores(CPU_SETSIZE, '0');
  for (std::size_t i = 0; i < cores.size(); ++i) {
    if (CPU_ISSET(i, &set)) cores[i] = '1';
  }
  return cores;
}

int cores_per_rank(Mesh& mesh) {
  const std::string mine = allowed_cores();
  const std::vector<std::string> all = mesh.world().gather_text(mine, "cores of the ranks");
  // mpirun may have given each rank cores of its own or left all of them the same ones: in both
  // cases the union belongs to the ranks of the node together.
  const Topology machines = Topology::of_machines(mesh.world());
  const std::vector<int>& nodes = machines.node_of_rank;
  const int node = nodes[static_cast<std::size_t>(mesh.rank())];
  std::string together = mine;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (nodes[rank] != node) continue;
    for (std::size_t i = 0; i < std::min(together.size(), all[rank].size()); ++i) {
      if (all[rank][i] == '1') together[i] = '1';
    }
  }
  const auto cores = std::count(together.begin(), together.end(), '1');
  const auto own = std::count(mine.begin(), mine.end(), '1');
  return static_cast<int>(std::clamp<std::ptrdiff_t>(cores / machines.ranks_on_node(node), 1,
                                                     std::max<std::ptrdiff_t>(own, 1)));
}

}  // namespace

int threads_per_rank(Mesh& mesh, int wanted) {
  const int cores = cores_per_rank(mesh);
  return wanted > 0 ? wanted : cores;
}

}  // namespace annulus
