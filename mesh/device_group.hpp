#pragma once

#include <exception>
#include <span>
#include <string>
#include <vector>

#include <annulus/mesh/group.hpp>

namespace annulus {

/// A group for memory of a device, over the same ranks in a group on the host, which takes the
/// control calls and must outlive it. What moves the data is left to the transports.
class DeviceGroup : public Group {
 public:
  DeviceGroup(Group& host, Place place) : host_(host), place_(place) {}

  [[nodiscard]] int rank() const noexcept final { return host_.rank(); }
  [[nodiscard]] int size() const noexcept final { return host_.size(); }
  [[nodiscard]] Place place() const noexcept final { return place_; }

  void barrier() final { host_.barrier(); }
  [[nodiscard]] std::vector<std::string> gather_text(const std::string& text) final {
    return host_.gather_text(text);
  }
  [[nodiscard]] std::vector<double> sum(std::span<const double> values) final {
    return host_.sum(values);
  }
  [[nodiscard]] std::vector<double> max(std::span<const double> values) final {
    return host_.max(values);
  }
  [[noreturn]] void abort(int exit_code) noexcept final {
    host_.abort(exit_code);
    std::terminate();  // never reached; the compiler cannot know
  }

 protected:
  [[nodiscard]] Group& host() noexcept { return host_; }

 private:
  Group& host_;
  Place place_;
};

}  // namespace annulus
