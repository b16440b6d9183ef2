#include "open_device.hpp"

#include <cstddef>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>

namespace annulus::launcher {
namespace {

// Why the rank has no GPU of its own; empty if it has.
std::string missing_gpu(std::size_t local_rank, int ranks_on_node) {
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) return reason;
  const std::size_t gpus = cuda_devices().size();
  if (local_rank < gpus) return "";
  return fmt::format("{} ranks on this node for {} visible GPUs: one rank per GPU", ranks_on_node,
                     gpus);
}

}  // namespace

std::unique_ptr<Device> open_device(const std::string& name, Mesh& mesh) {
  if (name == "cpu") return std::make_unique<HostDevice>();
  const Topology& topology = mesh.topology();
  const auto rank = static_cast<std::size_t>(mesh.rank());
  const int local_rank = topology.local_rank_of_rank[rank];
  const std::string missing = missing_gpu(static_cast<std::size_t>(local_rank),
                                          topology.ranks_on_node(topology.node_of_rank[rank]));
  if (name == "auto") {
    const bool all = mesh.world().max(std::vector{missing.empty() ? 0.0 : 1.0})[0] == 0;
    if (!all) return std::make_unique<HostDevice>();
  }
  return collectively(mesh.world(), [&] {
    if (!missing.empty()) throw UnsupportedError("--device cuda: " + missing);
    return make_cuda_device(local_rank);
  });
}

}  // namespace annulus::launcher
