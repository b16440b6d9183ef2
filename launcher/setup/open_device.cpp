#include "launcher/setup/open_device.hpp"

#include <cstddef>
#include <string>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/log.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/gpu_binding.hpp>
#include <annulus/ring/machine.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {
namespace {

// Users who name a transport between GPUs do not want to compute on the CPU; nor do users who have
// GPUs, unless they say so.
void check_cpu_is_meant(const Options& options, const GpuBinding& gpus) {
  if (options.share_gpus) {
    throw UnsupportedError("--share-gpus: needs GPU ranks: " + gpus.obstacle);
  }
  if (options.transport != Transport::automatic) {
    throw UnsupportedError(fmt::format("--transport {}: needs GPU ranks: {}",
                                       name_of(options.transport), gpus.obstacle));
  }
  if (gpus.any) {
    throw UnsupportedError("--device auto: there are GPUs, but not for every rank: " +
                           gpus.obstacle + " (--device cpu computes without them)");
  }
}

}  // namespace

namespace {

std::unique_ptr<Device> open_any(const Options& options, Mesh& mesh) {
  if (options.device == "cpu") return std::make_unique<HostDevice>();
  // The same on all ranks, and so are the errors that follow from it.
  const GpuBinding gpus = bind_gpus(mesh.world(), options.share_gpus);
  if (!gpus.obstacle.empty()) {
    if (options.device != "auto") throw UnsupportedError("--device cuda: " + gpus.obstacle);
    check_cpu_is_meant(options, gpus);
    return std::make_unique<HostDevice>();
  }
  return collectively(mesh.world(), [&] {
    return make_cuda_device(gpus.device_of_rank[static_cast<std::size_t>(mesh.rank())]);
  });
}

}  // namespace

std::unique_ptr<Device> open_device(const Options& options, Mesh& mesh) {
  std::unique_ptr<Device> device = open_any(options, mesh);
  const std::string found =
      fmt::format("computes on {} ({})", to_string(device->place()), device_name(device->place()));
  if (mesh.rank() != 0) {
    log_debug("{}", found);
    return device;
  }
  log_info("mesh {}: {} on {}", to_string(mesh.shape()), counted(mesh.size(), "rank"),
           counted(mesh.topology().nodes(), "node"));
  log_info("{}", found);
  return device;
}

}  // namespace annulus::launcher
