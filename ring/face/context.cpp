#include <array>
#include <chrono>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/cores.hpp>
#include <annulus/ring/context.hpp>

namespace annulus {
namespace {

MeshShape shape_of(const std::string& text, MPI_Comm communicator) {
  int ranks = 1;
  if (communicator != MPI_COMM_NULL) {
    check_mpi(MPI_Comm_size(communicator, &ranks), "MPI_Comm_size");
  }
  return MeshShape::parse(text, ranks);
}

// Ranks on GPUs and ranks on CPUs cannot compute together.
std::unique_ptr<Device> open_device(const ContextOptions& options, Mesh& mesh) {
  std::string missing;
  if (!options.place || !options.place->is_host()) missing = cuda_unavailable_reason();
  const bool wants_cuda = options.place ? !options.place->is_host() : missing.empty();
  const double wanted = wants_cuda ? 1 : 0;
  const bool any = mesh.world().max(std::array{wanted})[0] > 0;
  return collectively(mesh.world(), [&]() -> std::unique_ptr<Device> {
    if (!any) return std::make_unique<HostDevice>();
    if (!wants_cuda) {
      throw UnsupportedError(fmt::format("rank {} computes on the CPU and others on GPUs: {}",
                                         mesh.rank(),
                                         options.place ? "its place says so" : missing));
    }
    if (!missing.empty()) {
      throw UnsupportedError(fmt::format("rank {}: {}", mesh.rank(), missing));
    }
    return make_cuda_device(options.place ? options.place->device : current_cuda_device());
  });
}

}  // namespace

Context::Context(MPI_Comm communicator, const ContextOptions& options)
    : mesh_(std::make_unique<Mesh>(shape_of(options.mesh, communicator), communicator,
                                   Watchdog(Watchdog::Seconds(options.timeout)))),
      registry_(Registry::standard()),
      transport_(options.transport) {
  device_ = open_device(options, *mesh_);
  threads_ = options.threads > 0 ? options.threads : cores_per_rank(*mesh_);
}

}  // namespace annulus
