#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mpi.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/ring/tuning_cache.hpp>

namespace annulus {

class OneAtATime;
class Overlay;

/// How ranks get their devices.
enum class DeviceRule : std::uint8_t {
  named,     ///< ContextOptions::place; without a value, the current CUDA device
  assigned,  ///< each rank gets a GPU of its own, see bind_gpus(); CPUs where no rank sees any
  gpus       ///< likewise, but ranks without a GPU are an error
};

struct ContextOptions {
  /// Named axes and their sizes, the last one fastest; one size may be −1.
  std::string mesh = "sp=-1";
  /// The device of the rank. Without a value: the CUDA device that is current in the calling thread
  /// if this build and the machines of all ranks have one; the CPU if none has.
  std::optional<Place> place = {};
  DeviceRule devices = DeviceRule::named;
  /// True if several ranks may compute on one GPU.
  bool share_gpus = false;
  /// The carrier of data between GPUs.
  Transport transport = Transport::automatic;
  /// Seconds of silence after which a wait for other ranks fails. Ranks may differ in it.
  double timeout = Watchdog::kDefault.count();
  /// CPU threads of this rank's kernels; 0: its share of the cores that the ranks of its node have.
  /// Ranks may differ in it.
  int threads = 0;
};

/// The ranks that compute together, and the resources of this rank. Many Attention objects may use
/// one context, in any order that is the same on all ranks. Calls on a context, and on contexts
/// made from it, may come from any thread, but only one at a time. An overlapping call of another
/// thread throws LibraryError and does not disturb the first one. Not copyable; must outlive the
/// Attention objects.
class Context {
 public:
  /// Collective over `communicator`, which is duplicated and may be freed afterwards. All ranks
  /// throw the same UserError, even if only one rank is at fault: for a mesh that does not fit or
  /// differs, for a place that only some ranks have, for a GPU shared without `share_gpus`.
  explicit Context(MPI_Comm communicator, const ContextOptions& options = {});
  /// One rank, without MPI.
  explicit Context(const ContextOptions& options = {}) : Context(MPI_COMM_NULL, options) {}
  /// Another mesh of ranks of `base`, with the device, registry, watchdog and settings of `base`,
  /// which must outlive it. Collective over `communicator`; throws as the first constructor does
  /// for a mesh.
  Context(MPI_Comm communicator, const MeshShape& mesh, Context& base);
  /// Must run before MPI_Finalize. Collective on GPUs: ranks wait, at most for the timeout, until
  /// no rank uses mapped memory of another.
  ~Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  [[nodiscard]] int rank() const noexcept { return mesh_->rank(); }
  [[nodiscard]] int size() const noexcept { return mesh_->size(); }
  [[nodiscard]] Mesh& mesh() noexcept { return *mesh_; }
  [[nodiscard]] Device& device() noexcept { return *device_; }
  [[nodiscard]] Place place() const noexcept { return device_->place(); }
  [[nodiscard]] Transport transport() const noexcept { return transport_; }
  [[nodiscard]] int threads() const noexcept { return threads_; }
  /// The implementations that attention chooses from; add() your own before making attention.
  [[nodiscard]] Registry& registry() noexcept { return *registry_; }
  /// The results of tuning on this context.
  [[nodiscard]] ring::TuningCache& tuning_cache() noexcept { return tuning_cache_; }
  /// The combined choices of the overlays that are alive.
  [[nodiscard]] ring::Choice overlay() const;
  /// Guards every call on the context against overlapping ones.
  [[nodiscard]] OneAtATime& calls() noexcept { return *calls_; }
  /// Keeps what graphs of the caller still use, as long as it says so, or to the end of the
  /// context. It is asked whenever attention ends.
  void keep(std::function<bool()> is_used);

 private:
  friend class Overlay;
  std::shared_ptr<OneAtATime> calls_;
  std::shared_ptr<Device> device_;  // outlives what other ranks have mapped of it
  std::unique_ptr<Mesh> mesh_;
  std::shared_ptr<Registry> registry_;
  Transport transport_;
  int threads_ = 1;
  ring::TuningCache tuning_cache_;
  std::vector<const Overlay*> overlays_;       // the innermost last
  std::vector<std::function<bool()>> in_use_;  // each holds what it is asked about
};

/// While an overlay lives, attention made on its context takes these choices where its own options
/// leave them open, as if the options named them:
///
///     const annulus::Overlay overlay(context, {.schedule = "ulysses"});
///     annulus::Attention attention(context, options);
///
/// Overlays nest: the innermost one that sets a member counts. They must be the same on all ranks.
/// One thread at a time makes and ends overlays and attention on a context. Attention that was made
/// before, or that outlives the overlay, does not change.
class Overlay {
 public:
  Overlay(Context& context, ring::Choice choice);
  ~Overlay();
  Overlay(const Overlay&) = delete;
  Overlay& operator=(const Overlay&) = delete;

 private:
  friend class Context;
  Context& context_;
  ring::Choice choice_;
};

}  // namespace annulus
