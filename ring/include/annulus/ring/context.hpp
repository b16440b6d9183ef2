#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mpi.h>

#include <annulus/core/place.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/key_value_store.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/partition/shard_map.hpp>
#include <annulus/ring/tuning.hpp>

namespace annulus {

class Bootstrap;
class Device;
class Mesh;
class OneAtATime;
class Overlay;
class Registry;

/// How ranks get their devices.
enum class DeviceRule : std::uint8_t {
  named,     ///< ContextOptions::place; without a value, the current CUDA device
  assigned,  ///< each rank gets a GPU of its own; CPUs where no rank sees any
  gpus       ///< likewise, but ranks without a GPU are an error
};

/// As ContextOptions::place: the CUDA device that is current in the calling thread. Where there is
/// none, UnsupportedError, while no place at all means the CPU then.
inline constexpr Place kCurrentCudaDevice = Place::cuda(-1);

struct ContextOptions {
  static constexpr double kDefaultTimeout = 300;  // thousands of ranks take long to start
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
  /// Seconds of silence after which a wait for other ranks fails. Ranks may have different
  /// timeouts.
  double timeout = kDefaultTimeout;
  /// CPU threads of this rank's kernels; 0: its share of the cores that the ranks of its node have.
  /// Ranks may have different numbers of threads.
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
  explicit Context(const ContextOptions& options = {});
  /// Rank `rank` of `size` ranks, which find each other through a store instead of MPI; the store
  /// must outlive the context. Collective over these ranks; throws as above. The ranks exchange
  /// data between GPUs. On CPUs, a call that would exchange data throws UnsupportedError.
  Context(std::shared_ptr<KeyValueStore> store, int rank, int size,
          const ContextOptions& options = {});
  /// Another mesh of ranks of `base`, with the device, registry, watchdog and settings of `base`,
  /// which must outlive it. Collective over `communicator`; throws as the first constructor does
  /// for a mesh.
  Context(MPI_Comm communicator, const MeshShape& mesh, Context& base);
  /// Must run before MPI_Finalize. Collective on GPUs: ranks wait, at most for the timeout, until
  /// no rank uses mapped memory of another.
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  [[nodiscard]] const MeshShape& mesh_shape() const noexcept;
  /// True if some ranks that differ only along `axis` are on different nodes. Throws
  /// UnknownAxisError.
  [[nodiscard]] bool crosses_nodes(const std::string& axis) const;
  [[nodiscard]] Place place() const noexcept;
  /// Memory of the context's device, for tensors.
  [[nodiscard]] MemoryPool& memory() noexcept;
  [[nodiscard]] Transport transport() const noexcept;
  [[nodiscard]] int threads() const noexcept;
  /// The cache in memory of tuning on this context.
  [[nodiscard]] ring::TuningCache& tuning_cache() noexcept;
  /// The combined choices of the overlays that are alive.
  [[nodiscard]] ring::Choice overlay() const;

  // For the library and its program: headers of these classes are not installed.

  /// Ranks that `bootstrap` connects; null: one rank.
  Context(std::unique_ptr<Bootstrap> bootstrap, const ContextOptions& options);

  [[nodiscard]] Mesh& mesh() noexcept;
  [[nodiscard]] Device& device() noexcept;
  /// The implementations that attention chooses from; add() your own before making attention.
  [[nodiscard]] Registry& registry() noexcept;
  /// Guards every call on the context against overlapping ones.
  [[nodiscard]] OneAtATime& calls() noexcept;
  /// Keeps the resources that `is_used` owns, which graphs of the caller use, until it returns
  /// false or the context ends. `is_used` is called whenever an Attention object ends.
  void keep(std::function<bool()> is_used);

 private:
  Context(std::unique_ptr<Bootstrap> bootstrap, const MeshShape& mesh, Context& base);
  friend class Overlay;
  struct Impl;
  std::unique_ptr<Impl> impl_;
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

/// Returns a communicator that numbers the ranks of `communicator` node by node: nodes in order of
/// their first rank, ranks of a node in ascending order. The fast axes of a mesh over these ranks
/// then lie inside nodes, however the launcher has distributed the ranks. A rank's number may
/// change, and with it the shard that the rank holds; rank 0 stays first. The caller frees the
/// result. Collective, at any thread level of MPI. MPI_COMM_NULL gives MPI_COMM_NULL. Throws
/// TimeoutError, naming missing ranks; ArgumentError on all ranks for a bad ANNULUS_NODE on one.
[[nodiscard]] MPI_Comm in_node_order(MPI_Comm communicator);

/// Runs a function shard by shard, as JAX's shard_map does. Arguments that are not sharded as
/// in_specs are resharded first. The results get the shardings that out_specs describe; in each
/// dimension their global size is the sum of the local sizes along its axes. The distribution
/// kv_heads is not possible for a result, because the number of ranks that share a head does not
/// follow from the shards. Arguments and results lie in the memory of the context's device; sums
/// are made in host memory.
///
/// On a GPU, arguments are read after the earlier work of `stream`, a cudaStream_t, null for CUDA's
/// default stream. What the body submits to it sees the shards, and later work there sees the
/// results. The host waits for the body's work on `stream`, and for whatever ranks exchange or
/// compare. A stream under capture is refused with an UnsupportedError.
///
/// Collective over the context. The ranks agree on errors, so all of them throw together, if
/// - the body throws on any rank;
/// - the number of specs differs from the number of arguments or results;
/// - a spec does not fit its array (named_sharding.hpp);
/// - the local results cannot be parts of one array, or terms of one sum;
/// - a result is summed along an axis that its spec names, or has no floating-point dtype;
/// - results differ along an axis that their spec does not name (result, axis and ranks are named).
[[nodiscard]] std::vector<ShardedTensor> shard_map(Context& context, const ShardMap& map,
                                                   const ShardedArguments& arguments,
                                                   void* stream = nullptr);

/// Moves an array from one sharding to another. In a single exchange, each rank sends every other
/// rank exactly the elements that this other rank lacks; no rank ever holds the whole array. Takes
/// device memory for what this rank sends and receives.
///
/// `source` and `destination` are this rank's shards: they must have the local shapes of the
/// shardings, the same dtype and any strides, lie in the memory of the context's device and not
/// overlap. The call reads the source after earlier work of `stream`, as shard_map() does, and
/// returns when the destination is complete. A stream under capture is refused likewise.
///
/// Collective over the context; all ranks pass the same shardings and dtype. If the views of one
/// rank do not fit, every rank throws a UserError.
void reshard(Context& context, const NamedSharding& from, const ConstTensorView& source,
             const NamedSharding& to, const TensorView& destination, void* stream = nullptr);

}  // namespace annulus
