#include <array>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/core/one_at_a_time.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/bootstrap.hpp>
#include <annulus/mesh/cores.hpp>
#include <annulus/mesh/gpu_binding.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/tuning_cache.hpp>

namespace annulus {
namespace {

// An invalid timeout of one rank is reported later, when the ranks can communicate.
Watchdog start_watchdog(double timeout) {
  return Watchdog(timeout > 0 ? Watchdog::Seconds(timeout) : Watchdog::kDefault);
}

// A caller who names a transport between GPUs does not want to compute on the CPU. A caller who has
// GPUs does not want it either, unless he asks for the CPU.
void check_cpu_is_meant(const ContextOptions& options, const GpuBinding& gpus) {
  if (options.share_gpus) {
    throw UnsupportedError("share-gpus: needs GPU ranks: " + gpus.obstacle);
  }
  if (options.transport != Transport::automatic) {
    throw UnsupportedError(fmt::format("transport {}: needs GPU ranks: {}",
                                       name_of(options.transport), gpus.obstacle));
  }
  if (gpus.any) {
    throw UnsupportedError("device auto: there are GPUs, but not for every rank: " + gpus.obstacle);
  }
}

std::unique_ptr<Device> open_assigned(const ContextOptions& options, Mesh& mesh) {
  const GpuBinding gpus = bind_gpus(mesh.world(), options.share_gpus);
  return collectively(mesh.world(), "devices of the ranks", [&]() -> std::unique_ptr<Device> {
    if (gpus.obstacle.empty()) {
      return make_cuda_device(gpus.device_of_rank[static_cast<std::size_t>(mesh.rank())]);
    }
    if (options.devices == DeviceRule::gpus) {
      throw UnsupportedError("device cuda: " + gpus.obstacle);
    }
    check_cpu_is_meant(options, gpus);
    return std::make_unique<HostDevice>();
  });
}

// Ranks with different rules would wait for each other at different points.
void check_same_rule(const ContextOptions& options, Control& ranks) {
  const bool assigned = options.devices != DeviceRule::named;
  const double mine =
      2 * static_cast<double>(options.devices) + (assigned && options.share_gpus ? 1 : 0);
  const std::vector<double> most = ranks.max(std::array{mine, -mine}, "rules for devices");
  if (most[0] == -most[1]) return;
  throw ArgumentError("devices", "ranks under different rules, or that differ in share_gpus",
                      "the same on all ranks");
}

// Ranks on GPUs and ranks on CPUs cannot compute together.
std::unique_ptr<Device> open_named(const ContextOptions& options, Mesh& mesh) {
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
    if (!missing.empty()) throw UnsupportedError("device cuda: " + missing);
    if (!options.place || *options.place == kCurrentCudaDevice) {
      return make_cuda_device(current_cuda_device());
    }
    const auto devices = static_cast<int>(cuda_devices().size());
    if (options.place->device < 0 || options.place->device >= devices) {
      throw ArgumentError(fmt::format("place of rank {}", mesh.rank()), to_string(*options.place),
                          fmt::format("one of {} devices from cuda:0 on", devices));
    }
    return make_cuda_device(options.place->device);
  });
}

// A program that forgets to choose devices computes on the first one of a node with all ranks.
void check_sharing_is_meant(const ContextOptions& options, Place place, Mesh& mesh) {
  const auto shared = mesh.ranks_on_one_gpu(place);
  collectively(mesh.world(), "sharing of GPUs", [&] {
    if (!shared || options.share_gpus) return;
    throw UnsupportedError(
        fmt::format("ranks {} and {} compute on the same GPU: make another device current on each "
                    "rank of a node, or set ContextOptions::share_gpus",
                    shared->first, shared->second));
  });
}

}  // namespace

struct Context::Impl {
  Impl(std::unique_ptr<Bootstrap> bootstrap, const ContextOptions& options)
      : calls(std::make_shared<OneAtATime>("what belongs to a Context")),
        mesh(options.mesh, std::move(bootstrap), start_watchdog(options.timeout)),
        registry(std::make_shared<Registry>(Registry::standard())),
        transport(options.transport) {
    collectively(mesh.world(), "timeout of the context",
                 [&] { (void)Watchdog(Watchdog::Seconds(options.timeout)); });
    check_same_rule(options, mesh.world());
    if (options.devices == DeviceRule::named) {
      device = open_named(options, mesh);
    } else {
      device = open_assigned(options, mesh);
    }
    if (!device->place().is_host()) check_sharing_is_meant(options, device->place(), mesh);
    threads = threads_per_rank(mesh, options.threads);
  }
  Impl(std::unique_ptr<Bootstrap> bootstrap, const MeshShape& shape, Impl& base)
      : calls(base.calls),
        device(base.device),
        mesh(shape, std::move(bootstrap), base.mesh.watchdog()),
        registry(base.registry),
        transport(base.transport),
        threads(base.threads) {}

  std::shared_ptr<OneAtATime> calls;
  std::shared_ptr<Device> device;  // outlives the memory that other ranks have mapped
  Mesh mesh;
  std::shared_ptr<Registry> registry;
  Transport transport;
  int threads = 1;
  ring::TuningCache tuning_cache;
  std::vector<const Overlay*> overlays;       // the innermost last
  std::vector<std::function<bool()>> in_use;  // each owns the resources that it is asked about
};

static_assert(ContextOptions::kDefaultTimeout == Watchdog::kDefault.count());

Context::Context(const ContextOptions& options) : Context(std::unique_ptr<Bootstrap>(), options) {}
Context::Context(std::shared_ptr<KeyValueStore> store, int rank, int size,
                 const ContextOptions& options)
    : Context(make_store_bootstrap(std::move(store), rank, size), options) {}
Context::Context(std::unique_ptr<Bootstrap> bootstrap, const ContextOptions& options)
    : impl_(std::make_unique<Impl>(std::move(bootstrap), options)) {}
Context::Context(std::unique_ptr<Bootstrap> bootstrap, const MeshShape& mesh, Context& base)
    : impl_(std::make_unique<Impl>(std::move(bootstrap), mesh, *base.impl_)) {}
Context::~Context() {
  if (!impl_ || impl_->in_use.empty()) return;
  // Graphs of the caller may have been launched since the objects in them were destroyed.
  try {
    Device& device = *impl_->device;
    const auto current = device.make_current();
    const auto stream = device.make_stream("end", impl_->mesh.watchdog(), nullptr);
    device.await_calls(*stream);
    stream->synchronize();
  } catch (...) {
    // There is no later call to report the error.
  }
}

int Context::rank() const noexcept {
  return impl_->mesh.rank();
}
int Context::size() const noexcept {
  return impl_->mesh.size();
}
const MeshShape& Context::mesh_shape() const noexcept {
  return impl_->mesh.shape();
}
bool Context::crosses_nodes(const std::string& axis) const {
  return impl_->mesh.crosses_nodes(axis);
}
Place Context::place() const noexcept {
  return impl_->device->place();
}
MemoryPool& Context::memory() noexcept {
  return impl_->device->memory();
}
Transport Context::transport() const noexcept {
  return impl_->transport;
}
int Context::threads() const noexcept {
  return impl_->threads;
}
ring::TuningCache& Context::tuning_cache() noexcept {
  return impl_->tuning_cache;
}
Mesh& Context::mesh() noexcept {
  return impl_->mesh;
}
Device& Context::device() noexcept {
  return *impl_->device;
}
Registry& Context::registry() noexcept {
  return *impl_->registry;
}
OneAtATime& Context::calls() noexcept {
  return *impl_->calls;
}

void Context::keep(std::function<bool()> is_used) {
  if (is_used()) impl_->in_use.push_back(std::move(is_used));
  std::erase_if(impl_->in_use, [](const auto& one) { return !one(); });
}

ring::Choice Context::overlay() const {
  ring::Choice choice;
  for (const Overlay* overlay : impl_->overlays) choice = nested(choice, overlay->choice_);
  return choice;
}

Overlay::Overlay(Context& context, ring::Choice choice)
    : context_(context), choice_(std::move(choice)) {
  context.impl_->overlays.push_back(this);
}

Overlay::~Overlay() {
  std::erase(context_.impl_->overlays, this);
}

}  // namespace annulus
