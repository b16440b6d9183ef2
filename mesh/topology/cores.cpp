#include <algorithm>
#include <cstddef>
#include <map>
#include <sched.h>
#include <sstream>
#include <string>

#include <fmt/format.h>

#include <annulus/mesh/cores.hpp>

#include "topology/node_identity.hpp"

namespace annulus {
namespace {

// The cores that this process may run on, one character per core: '1' or '0'.
std::string allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // The call fails if there are more cores than a cpu_set_t holds; the rank then counts one.
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return "1";
  std::string cores(CPU_SETSIZE, '0');
  for (std::size_t i = 0; i < cores.size(); ++i) {
    if (CPU_ISSET(i, &set)) cores[i] = '1';
  }
  cores.resize(cores.rfind('1') + 1);
  return cores;
}

// The cores that the ranks of a machine may use together, and the number of these ranks.
struct MachineCores {
  std::string cores;
  int ranks = 0;
};
// By name of the machine; three lines each as a text.
using CoresOfMachines = std::map<std::string, MachineCores>;

std::string encoded(const CoresOfMachines& machines) {
  std::string text;
  for (const auto& [name, one] : machines) {
    text += fmt::format("{}\n{}\n{}\n", name, one.cores, one.ranks);
  }
  return text;
}

CoresOfMachines decoded(const std::string& text) {
  CoresOfMachines machines;
  std::istringstream lines(text);
  for (std::string name, cores, ranks; std::getline(lines, name);) {
    std::getline(lines, cores);
    std::getline(lines, ranks);
    machines[name] = {cores, std::stoi(ranks)};
  }
  return machines;
}

void add_machines(std::string& whole, const std::string& later) {
  CoresOfMachines machines = decoded(whole);
  for (const auto& [name, more] : decoded(later)) {
    MachineCores& one = machines[name];
    one.cores.resize(std::max(one.cores.size(), more.cores.size()), '0');
    for (std::size_t i = 0; i < more.cores.size(); ++i) {
      if (more.cores[i] == '1') one.cores[i] = '1';
    }
    one.ranks += more.ranks;
  }
  whole = encoded(machines);
}

// mpirun may have given each rank its own cores or all ranks the same ones. In both cases the union
// belongs to all ranks of the machine.
int cores_per_rank(Mesh& mesh) {
  const std::string mine = allowed_cores();
  std::string machine = host_name() + ' ' + machine_identity();
  std::replace(machine.begin(), machine.end(), '\n', ' ');
  const CoresOfMachines machines = decoded(
      mesh.world().merge_text(encoded({{machine, {mine, 1}}}), add_machines, "cores of the ranks"));
  const MachineCores& together = machines.at(machine);
  const auto cores = std::count(together.cores.begin(), together.cores.end(), '1');
  const auto own = std::count(mine.begin(), mine.end(), '1');
  return static_cast<int>(
      std::clamp<std::ptrdiff_t>(cores / together.ranks, 1, std::max<std::ptrdiff_t>(own, 1)));
}

}  // namespace

int threads_per_rank(Mesh& mesh, int wanted) {
  const int cores = cores_per_rank(mesh);
  return wanted > 0 ? wanted : cores;
}

}  // namespace annulus
