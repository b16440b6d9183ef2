#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/mesh/mpi.hpp>
#include <annulus/mesh/peer_reach.hpp>
#include <annulus/mesh/topology.hpp>
#include <annulus/mesh/transport.hpp>

namespace annulus {

class Bootstrap;
class CallWatch;
class NcclGroups;

/// True if ranks that differ only along `axis` ever sit on different nodes. Throws
/// UnknownAxisError.
[[nodiscard]] bool crosses_nodes(const MeshShape& shape, const Topology& topology,
                                 const std::string& axis);

/// The ranks of a communicator on named axes, with a group of ranks per axis and per tuple of axes.
class Mesh {
 public:
  /// Collective over `communicator`, which is duplicated and may be freed afterwards. MPI must be
  /// initialised unless `communicator` is MPI_COMM_NULL: that makes a mesh of one rank without MPI.
  /// Ranks connected by `watchdog` get this rank's heartbeats too. Throws ArgumentError on all
  /// ranks if the shape's product is not the communicator's size, or if they have different shapes.
  Mesh(const MeshShape& shape, MPI_Comm communicator, const Watchdog& watchdog);
  /// The same with a text for MeshShape::parse(). If the text is wrong on one rank, all ranks throw
  /// ArgumentError.
  Mesh(const std::string& shape, MPI_Comm communicator, const Watchdog& watchdog);
  /// The same over the ranks that `bootstrap` connects; null: one rank alone.
  Mesh(const MeshShape& shape, std::unique_ptr<Bootstrap> bootstrap, const Watchdog& watchdog);
  Mesh(const std::string& shape, std::unique_ptr<Bootstrap> bootstrap, const Watchdog& watchdog);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  [[nodiscard]] const MeshShape& shape() const noexcept { return shape_; }
  [[nodiscard]] const Topology& topology() const noexcept { return topology_; }
  [[nodiscard]] int rank() const noexcept { return world_->rank(); }
  [[nodiscard]] int size() const noexcept { return world_->size(); }
  /// The given watchdog, connected to all ranks of the mesh: a stream that waits with it does not
  /// give up while another rank is computing.
  [[nodiscard]] const Watchdog& watchdog() const noexcept { return watchdog_; }

  /// Watches calls of the mesh, with the same timeout.
  [[nodiscard]] CallWatch& call_watch() noexcept { return *call_watch_; }

  /// Coordinates all ranks of the mesh.
  [[nodiscard]] Control& world() noexcept { return *world_; }
  /// All ranks of the mesh, for exchanging host memory. If a key-value store connects them
  /// (bootstrap.hpp), messages must be short. The first call is collective over the mesh.
  [[nodiscard]] Group& group();
  /// The ranks that differ from this one only along `axes`, in row-major order of those axes (first
  /// = major). The first request for a tuple is collective over the mesh; later ones return the
  /// same group. Throws UnknownAxisError, and ArgumentError if an axis occurs twice. Without axes,
  /// or with axes of size one, it is a group of this rank alone.
  [[nodiscard]] Group& group(std::span<const std::string> axes);
  /// The same ranks, for memory at `place`: the group above for host memory, one of `transport` for
  /// a CUDA device. automatic means the first of transports(). The first request for a tuple and a
  /// transport is collective over the mesh; later ones return the same group. A group of one rank
  /// sends nothing, so it is the host's. Throws UnsupportedError with the reason, on all ranks, if
  /// the transport is not possible, or the ranks cannot exchange data at `place`; and
  /// ArgumentError, on this rank, for a CUDA device other than the one of earlier calls.
  [[nodiscard]] Group& group(std::span<const std::string> axes, Place place,
                             Transport transport = Transport::automatic);
  /// All ranks of the mesh, likewise.
  [[nodiscard]] Group& group(Place place, Transport transport = Transport::automatic);
  /// The transports for CUDA devices `place` along these axes, the preferred one first, the same on
  /// all ranks of the mesh: peer if all ranks of every group can copy out of each other's memory,
  /// composite if only some can; and NCCL. A listed transport may still fail to start. Empty for
  /// host memory and for groups of one rank. Collective like group().
  [[nodiscard]] std::vector<Transport> transports(std::span<const std::string> axes, Place place);
  /// Two ranks of the mesh that compute on the same GPU, if there are any. This rank computes at
  /// `place`, a CUDA device. The first call is collective over the mesh; later ones repeat its
  /// result.
  [[nodiscard]] std::optional<std::pair<int, int>> ranks_on_one_gpu(Place place);
  /// Like the free function, for this mesh.
  [[nodiscard]] bool crosses_nodes(const std::string& axis) const {
    return annulus::crosses_nodes(shape_, topology_, axis);
  }

 private:
  Mesh(const std::function<MeshShape(int ranks)>& shape, std::unique_ptr<Bootstrap> bootstrap,
       const Watchdog& watchdog);
  [[nodiscard]] AxisNames all_axes() const;
  [[nodiscard]] AxisNames group_key(std::span<const std::string> axes) const;
  /// The ranks along some axes that can copy out of each other's memory, in this rank's group and
  /// in all groups of the mesh.
  struct Reach {
    PeerReach own;
    PeerExtent extent = PeerExtent::none;
    std::string obstacle;  ///< the first of any group; "" if all ranks of every group can
  };
  [[nodiscard]] const Reach& peer_reach(const AxisNames& key, Group& host, Place place);
  /// Throws ArgumentError if this rank has used another device in the mesh.
  void take_device(Place place);
  [[nodiscard]] std::unique_ptr<Group> make_device_group(const AxisNames& key, Group& host,
                                                         Place place, Transport transport);
  [[nodiscard]] std::unique_ptr<Group> make_nccl_group(Group& host, Place place);

  std::unique_ptr<Bootstrap> bootstrap_;  // null: one rank alone
  Watchdog watchdog_;
  std::shared_ptr<CallWatch> call_watch_;
  std::shared_ptr<Control> world_;
  MeshShape shape_;
  Topology topology_;
  std::map<AxisNames, std::unique_ptr<Group>> groups_;
  std::optional<Place> device_;                                         // of the members below
  std::optional<std::optional<std::pair<int, int>>> ranks_on_one_gpu_;  // once it is known
  std::map<AxisNames, Reach> peer_reaches_;
  std::unique_ptr<NcclGroups> nccl_;  // made when first needed
  // Built on the groups in groups_; by chosen transport, never automatic.
  std::map<std::pair<AxisNames, Transport>, std::unique_ptr<Group>> device_groups_;
};

}  // namespace annulus
