#pragma once

#include <annulus/mesh/group.hpp>

namespace annulus {

/// A group for memory of a device, over the same ranks in a group on the host, which must outlive
/// it. What moves the data is left to the transports.
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
