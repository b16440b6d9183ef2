#pragma once

#include <annulus/mesh/group.hpp>

namespace annulus {

/// A group for device memory, over the ranks of a host group, which must outlive it. Transports
/// derive from it and move the data.
class DeviceGroup : public Group {
 public:
  DeviceGroup(Group& host, Place place)
      : Group(host.shared_control()), host_(host), place_(place) {}

  [[nodiscard]] Place place() const noexcept final { return place_; }

 protected:
  [[nodiscard]] Group& host() noexcept { return host_; }

 private:
  Group& host_;
  Place place_;
};

}  // namespace annulus
