#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/call_watch.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/bootstrap.hpp>
#include <annulus/mesh/composite_group.hpp>
#include <annulus/mesh/gpu_binding.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/nccl_group.hpp>
#include <annulus/mesh/peer_copy_group.hpp>

namespace annulus {
namespace {

// Heartbeats between the ranks of a mesh. They also go to ranks connected by `others`, which may
// wait for this mesh.
class HeartbeatsOfMesh final : public Heartbeats {
 public:
  HeartbeatsOfMesh(std::shared_ptr<Heartbeats> own, Watchdog others)
      : own_(std::move(own)), others_(std::move(others)) {}
  void beat(State state) override {
    own_->beat(state);
    others_.beat(state);
  }
  [[nodiscard]] double silence(const Peers& peers) override { return own_->silence(peers); }
  [[nodiscard]] std::vector<int> silent_ranks() override { return own_->silent_ranks(); }
  [[nodiscard]] bool any_thread_may_beat() const override { return own_->any_thread_may_beat(); }

 private:
  std::shared_ptr<Heartbeats> own_;
  Watchdog others_;
};

// Sends four heartbeats per timeout, so that late ones do no harm.
Watchdog with_heartbeats(const Watchdog& watchdog, Bootstrap* bootstrap) {
  if (bootstrap == nullptr) return watchdog;
  const Watchdog::Seconds interval = std::min(Watchdog::Seconds(1), watchdog.timeout() / 4);
  return Watchdog(watchdog.timeout(), std::make_shared<HeartbeatsOfMesh>(
                                          bootstrap->connect(interval, watchdog), watchdog));
}

std::shared_ptr<Control> make_world(Bootstrap* bootstrap, const Watchdog& watchdog) {
  if (bootstrap == nullptr) return make_self_group()->shared_control();
  return bootstrap->control(watchdog);
}

// Ranks with different meshes would wait for each other for ever, so all of them throw.
void check_shape(const MeshShape& shape, Control& world) {
  if (const auto other = world.first_difference(to_string(shape), "mesh")) {
    throw ArgumentError("mesh", fmt::format("{} on rank {}", other->text, other->rank),
                        fmt::format("{}, as on rank 0", other->expected));
  }
  if (shape.ranks() != world.size()) {
    throw ArgumentError(
        "mesh", fmt::format("{} ({} ranks)", to_string(shape), shape.ranks()),
        fmt::format("sizes whose product is {}, the number of ranks", world.size()));
  }
}

// Ranks that ask for different groups would split wrongly or wait in vain.
void check_same_axes(const AxisNames& axes, std::string_view carrier, Control& world) {
  const std::string mine = fmt::format("{}{}", fmt::join(axes, "+"), carrier);
  if (const auto other = world.first_difference(mine, "axes of a group")) {
    throw ArgumentError("axes of a group", fmt::format("'{}' on rank {}", other->text, other->rank),
                        fmt::format("'{}', as on rank 0", other->expected));
  }
}

}  // namespace

bool crosses_nodes(const MeshShape& shape, const Topology& topology, const std::string& axis) {
  const auto node_of = [&](int rank) {
    return topology.node_of_rank.at(static_cast<std::size_t>(rank));
  };
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    const int first = shape.group(rank, {&axis, 1}).front();
    if (node_of(rank) != node_of(first)) return true;
  }
  return false;
}

Mesh::Mesh(const MeshShape& shape, std::unique_ptr<Bootstrap> bootstrap, const Watchdog& watchdog)
    : Mesh([&](int /*ranks*/) { return shape; }, std::move(bootstrap), watchdog) {}

Mesh::Mesh(const std::string& shape, std::unique_ptr<Bootstrap> bootstrap, const Watchdog& watchdog)
    : Mesh([&](int ranks) { return MeshShape::parse(shape, ranks); }, std::move(bootstrap),
           watchdog) {}

// Ranks connect before they check their arguments, which may be wrong on one of them.
Mesh::Mesh(const std::function<MeshShape(int ranks)>& shape, std::unique_ptr<Bootstrap> bootstrap,
           const Watchdog& watchdog)
    : bootstrap_(std::move(bootstrap)),
      watchdog_(with_heartbeats(watchdog, bootstrap_.get())),
      call_watch_(std::make_shared<CallWatch>(watchdog_.timeout())),
      world_(make_world(bootstrap_.get(), watchdog_)),
      shape_(collectively(*world_, [&] { return shape(world_->size()); })),
      topology_(Topology::discover(*world_)) {
  check_shape(shape_, *world_);
}

Mesh::~Mesh() = default;

// Axes of size one change nothing, so tuples that differ only by them share a group.
AxisNames Mesh::group_key(std::span<const std::string> axes) const {
  (void)shape_.size(axes);  // throws for unknown or repeated axes
  AxisNames key;
  for (const std::string& axis : axes) {
    if (shape_.axis_size(axis) > 1) key.push_back(axis);
  }
  return key;
}

Group& Mesh::group(std::span<const std::string> axes, Place place, Transport transport) {
  Group& host = group(axes);
  if (host.size() == 1) return host;
  if (place.is_host()) {
    if (std::string obstacle = bootstrap_->obstacle(); !obstacle.empty()) {
      throw UnsupportedError(std::move(obstacle));
    }
    return host;
  }
  const AxisNames key = group_key(axes);
  if (transport == Transport::automatic) transport = transports(axes, place).front();
  take_device(place);
  std::unique_ptr<Group>& group = device_groups_[{key, transport}];
  if (!group) group = make_device_group(key, host, place, transport);
  return *group;
}

std::optional<std::pair<int, int>> Mesh::ranks_on_one_gpu(Place place) {
  if (!ranks_on_one_gpu_) ranks_on_one_gpu_ = annulus::ranks_on_one_gpu(*world_, place.device);
  return *ranks_on_one_gpu_;
}

std::vector<Transport> Mesh::transports(std::span<const std::string> axes, Place place) {
  Group& host = group(axes);
  if (place.is_host() || host.size() == 1) return {};
  take_device(place);
  return device_transports(peer_reach(group_key(axes), host, place).extent);
}

void Mesh::take_device(Place place) {
  if (device_.value_or(place) != place) {
    throw ArgumentError(
        "place of a group", to_string(place),
        fmt::format("{}, the device of this rank in the mesh", to_string(*device_)));
  }
  device_ = place;
}

const Mesh::Reach& Mesh::peer_reach(const AxisNames& key, Group& host, Place place) {
  if (const auto known = peer_reaches_.find(key); known != peer_reaches_.end()) {
    return known->second;
  }
  Reach reach;  // remembered only when complete
  reach.own = peer_copy_reach(host, place);
  // All ranks of a mesh take the same transport, so the joint extent of all groups counts.
  reach.obstacle = world_->first_text(reach.own.obstacle, "what ranks do not reach along axes");
  std::vector<PeerExtent> extents;
  for (const std::string& extent : world_->distinct_texts(
           std::to_string(static_cast<int>(reach.own.extent())), "what ranks reach along axes")) {
    extents.push_back(static_cast<PeerExtent>(std::stoi(extent)));
  }
  reach.extent = joint(extents);
  return peer_reaches_.emplace(key, std::move(reach)).first->second;
}

std::unique_ptr<Group> Mesh::make_device_group(const AxisNames& key, Group& host, Place place,
                                               Transport transport) {
  check_same_axes(key, fmt::format(" by transport {}", name_of(transport)), *world_);
  if (transport == Transport::nccl) return make_nccl_group(host, place);
  const Reach& reach = peer_reach(key, host, place);
  if (transport == Transport::peer && !reach.obstacle.empty()) {
    throw UnsupportedError("transport peer: " + reach.obstacle);
  }
  std::unique_ptr<Group> across;
  if (transport == Transport::composite) across = make_nccl_group(host, place);
  std::unique_ptr<Group> copies =
      collectively(*world_, [&] { return make_peer_copy_group(host, place, watchdog_); });
  if (!across) return copies;
  return collectively(*world_, [&] {
    return make_composite_group(host, reach.own, std::move(copies), std::move(across), watchdog_);
  });
}

std::unique_ptr<Group> Mesh::make_nccl_group(Group& host, Place place) {
  if (!nccl_) nccl_ = make_nccl_groups(*world_, place, watchdog_);
  return nccl_->make(host);
}

Group& Mesh::group(std::span<const std::string> axes) {
  const AxisNames key = group_key(axes);
  const std::vector<int> members = shape_.group(rank(), key);
  std::unique_ptr<Group>& group = groups_[key];
  if (group) return *group;
  check_same_axes(key, "", *world_);
  if (members.size() == 1) {
    group = make_self_group(rank());
  } else {
    group = bootstrap_->group(members, fmt::format("{}", fmt::join(key, "+")), watchdog_);
  }
  return *group;
}

Group& Mesh::group() {
  return group(all_axes());
}

Group& Mesh::group(Place place, Transport transport) {
  return group(all_axes(), place, transport);
}

AxisNames Mesh::all_axes() const {
  AxisNames all;
  for (const MeshAxis& axis : shape_.axes()) all.push_back(axis.name);
  return all;
}

}  // namespace annulus
