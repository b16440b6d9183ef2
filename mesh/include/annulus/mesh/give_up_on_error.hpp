#pragma once

#include <exception>

#include <annulus/mesh/group.hpp>

namespace annulus {

/// Gives up a group when an exception leaves the scope: see Group::give_up(). Declare it after the
/// buffers of the group's exchanges. Freeing device memory waits for all work on the device, which
/// may itself wait for a peer that never comes.
class GiveUpOnError {
 public:
  explicit GiveUpOnError(Group& group) noexcept : group_(group) {}
  ~GiveUpOnError() {
    if (std::uncaught_exceptions() > exceptions_) group_.give_up();
  }
  GiveUpOnError(const GiveUpOnError&) = delete;
  GiveUpOnError& operator=(const GiveUpOnError&) = delete;

 private:
  Group& group_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace annulus
