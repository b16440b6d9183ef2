#include <array>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/cores.hpp>
#include <annulus/mesh/gpu_binding.hpp>
#include <annulus/ring/context.hpp>

namespace annulus {
namespace {

// One rank's may be wrong, which is told once the ranks can talk.
Watchdog start_watchdog(double timeout) {
  return Watchdog(timeout > 0 ? Watchdog::Seconds(timeout) : Watchdog::kUsual);
}

// Ranks on GPUs and ranks on CPUs cannot compute together.
std::unique_ptr<Device> open_device(const ContextOptions& options, Mesh& mesh) {
  std::string missing;
  if (!options.place || !options.place->is_host()) missing = cuda_unavailable_reason();
  const bool wants_cuda = options.place ? !options.place->is_host() : missing.empty();
  const double wanted = wants_cuda ? 1 : 0;
  const bool any = mesh.world().max(std::array{wanted}, "whether ranks want GPUs")[0] > 0;
  return collectively(mesh.world(), "devices of the ranks", [&]() -> std::unique_ptr<Device> {
    if (!any) return std::make_unique<HostDevice>();
    if (!wants_cuda) {
      throw UnsupportedError(fmt::format("rank {} computes on the CPU and others on GPUs: {}",
                                         mesh.rank(),
                                         options.place ? "its place says so" : missing));
    }
    if (!missing.empty()) {
      throw UnsupportedError(fmt::format("rank {}: {}", mesh.rank(), missing));
    }
    if (!options.place) return make_cuda_device(current_cuda_device());
    const auto devices = static_cast<int>(cuda_devices().size());
    if (options.place->device < 0 || options.place->device >= devices) {
      throw ArgumentError(fmt::format("place of rank {}", mesh.rank()), to_string(*options.place),
                          fmt::format("one of {} devices from cuda:0 on", devices));
    }
    return make_cuda_device(options.place->device);
  });
}

// A program that forgets to choose devices computes on the first one of a node with all ranks.
void check_sharing_is_meant(const ContextOptions& options, Place place, Control& ranks) {
  if (place.is_host()) return;
  const auto shared = ranks_on_one_gpu(ranks, place.device);
  collectively(ranks, "sharing of GPUs", [&] {
    if (!shared || options.share_gpus) return;
    throw UnsupportedError(
        fmt::format("ranks {} and {} compute on the same GPU: make another device current on each "
                    "rank of a node, or set ContextOptions::share_gpus",
                    shared->first, shared->second));
  });
}

}  // namespace

Context::Context(MPI_Comm communicator, const ContextOptions& options)
    : mesh_(std::make_unique<Mesh>(options.mesh, communicator, start_watchdog(options.timeout))),
      registry_(Registry::standard()),
      transport_(options.transport) {
  collectively(mesh_->world(), "timeout of the context",
               [&] { (void)Watchdog(Watchdog::Seconds(options.timeout)); });
  device_ = open_device(options, *mesh_);
  check_sharing_is_meant(options, device_->place(), mesh_->world());
  threads_ = threads_per_rank(*mesh_, options.threads);
}

ring::Choice Context::overlay() const {
  ring::Choice choice;
  for (const Overlay* overlay : overlays_) choice = nested(choice, overlay->choice_);
  return choice;
}

Overlay::Overlay(Context& context, ring::Choice choice)
    : context_(context), choice_(std::move(choice)) {
  context.overlays_.push_back(this);
}

Overlay::~Overlay() {
  std::erase(context_.overlays_, this);
}

}  // namespace annulus
