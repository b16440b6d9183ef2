#pragma once

#include <memory>

#include <annulus/mesh/group.hpp>

#include "store/store_messenger.hpp"

namespace annulus {

/// A group for host memory whose exchanges carry short messages only; see make_store_bootstrap().
[[nodiscard]] std::unique_ptr<Group> make_store_group(std::shared_ptr<const StoreRanks> ranks,
                                                      Watchdog watchdog);
/// The reason why it carries no longer messages.
[[nodiscard]] std::string store_obstacle();

}  // namespace annulus
