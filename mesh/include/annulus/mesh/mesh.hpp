#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/mesh/mpi.hpp>
#include <annulus/mesh/nccl_group.hpp>
#include <annulus/mesh/topology.hpp>
#include <annulus/mesh/transport.hpp>

namespace annulus {

/// Whether ranks that differ only along `axis` ever sit on different nodes. Throws
/// UnknownAxisError.
[[nodiscard]] bool crosses_nodes(const MeshShape& shape, const Topology& topology,
                                 const std::string& axis);

/// The ranks of a communicator on named axes, with a group of ranks per axis and per tuple of axes.
class Mesh {
 public:
  /// Collective over `communicator`, which is duplicated and may be freed afterwards. MPI must be
  /// initialised unless `communicator` is MPI_COMM_NULL: that makes a mesh of one rank without MPI.
  /// Throws ArgumentError on all ranks when the shape's product is not the communicator's size, or
  /// when ranks were given different shapes.
  Mesh(MeshShape shape, MPI_Comm communicator, const Watchdog& watchdog);

  [[nodiscard]] const MeshShape& shape() const noexcept { return shape_; }
  [[nodiscard]] const Topology& topology() const noexcept { return topology_; }
  [[nodiscard]] int rank() const noexcept { return world_->rank(); }
  [[nodiscard]] int size() const noexcept { return world_->size(); }
  /// The watchdog given, with signs of life between the mesh's ranks: a stream that waits with it
  /// does not give up while another rank computes on one of its own.
  [[nodiscard]] const Watchdog& watchdog() const noexcept { return watchdog_; }

  /// All ranks of the mesh, to meet and agree.
  [[nodiscard]] Control& world() noexcept { return *world_; }
  /// All ranks of the mesh, to exchange host memory. Collective over the mesh the first time.
  [[nodiscard]] Group& group();
  /// The ranks that differ from this one only along `axes`, in row-major order of those axes (first
  /// = major). Collective over the mesh the first time that a tuple is asked for; kept afterwards.
  /// Throws UnknownAxisError, and ArgumentError for an axis named twice. No axes, or axes of size
  /// one: a self group.
  [[nodiscard]] Group& group(std::span<const std::string> axes);
  /// The same ranks, for memory at `place`: the group itself for host memory, one of `transport`
  /// for a CUDA device; automatic is peer where nothing stands in its way on any rank (see
  /// peer_copy_obstacle()), else NCCL. Collective over the mesh the first time that a tuple is
  /// asked for with a transport; kept afterwards. A group of one rank moves nothing and is the
  /// host's. Throws UnsupportedError with the reason, on all ranks, for a transport that cannot.
  [[nodiscard]] Group& group(std::span<const std::string> axes, Place place,
                             Transport transport = Transport::automatic);
  /// As the free function, for this mesh.
  [[nodiscard]] bool crosses_nodes(const std::string& axis) const {
    return annulus::crosses_nodes(shape_, topology_, axis);
  }

 private:
  [[nodiscard]] AxisNames group_key(std::span<const std::string> axes) const;
  /// What stands in the way of transport peer anywhere in the mesh, along these axes.
  [[nodiscard]] const std::string& peer_obstacle(const AxisNames& key, Group& host, Place place);
  [[nodiscard]] std::unique_ptr<Group> make_device_group(const AxisNames& key, Group& host,
                                                         Place place, Transport transport);

  MeshShape shape_;
  Communicator communicator_;  // those of groups are copies of it
  Watchdog watchdog_;
  std::shared_ptr<Control> world_;
  Topology topology_;
  std::map<AxisNames, std::unique_ptr<Group>> groups_;
  std::map<AxisNames, std::string> peer_obstacles_;  // "": none
  std::unique_ptr<NcclWorld> nccl_;                  // made when first needed
  // Over those in groups_, by the transport that automatic came to.
  std::map<std::pair<AxisNames, Transport>, std::unique_ptr<Group>> device_groups_;
};

}  // namespace annulus
