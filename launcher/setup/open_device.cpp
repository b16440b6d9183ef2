#include "launcher/setup/open_device.hpp"

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>

namespace annulus::launcher {
namespace {

/// The GPU of a rank among those that it sees.
struct GpuChoice {
  int index = 0;
  std::string missing;  ///< why there is none; empty if there is one
};

GpuChoice choose_gpu(int local_rank, int ranks_on_node, bool share_gpus) {
  if (std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return {0, std::move(reason)};
  }
  const int gpus = static_cast<int>(cuda_devices().size());
  if (share_gpus) return {local_rank % gpus, ""};
  if (local_rank < gpus) return {local_rank, ""};
  return {0, fmt::format("{} ranks on this node for {} visible GPUs: one rank per GPU, or "
                         "--share-gpus",
                         ranks_on_node, gpus)};
}

// Whoever names a transport between GPUs does not want to compute on the CPU.
void check_cpu_is_meant(const Options& options, const GpuChoice& gpu, Mesh& mesh) {
  if (options.transport == Transport::automatic) return;
  collectively(mesh.world(), [&] {
    const std::string option = options.share_gpus
                                   ? "--share-gpus"
                                   : fmt::format("--transport {}", name_of(options.transport));
    throw UnsupportedError(
        fmt::format("{}: needs GPU ranks: {}", option,
                    gpu.missing.empty() ? "another rank has no GPU" : gpu.missing));
  });
}

}  // namespace

std::unique_ptr<Device> open_device(const Options& options, Mesh& mesh) {
  if (options.device == "cpu") return std::make_unique<HostDevice>();
  const Topology& topology = mesh.topology();
  const auto rank = static_cast<std::size_t>(mesh.rank());
  const GpuChoice gpu =
      choose_gpu(topology.local_rank_of_rank[rank],
                 topology.ranks_on_node(topology.node_of_rank[rank]), options.share_gpus);
  if (options.device == "auto") {
    const bool all = mesh.world().max(std::vector{gpu.missing.empty() ? 0.0 : 1.0})[0] == 0;
    if (!all) {
      check_cpu_is_meant(options, gpu, mesh);
      return std::make_unique<HostDevice>();
    }
  }
  return collectively(mesh.world(), [&] {
    if (!gpu.missing.empty()) throw UnsupportedError("--device cuda: " + gpu.missing);
    return make_cuda_device(gpu.index);
  });
}

}  // namespace annulus::launcher
