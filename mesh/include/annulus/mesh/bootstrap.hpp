#pragma once

#include <memory>
#include <string>
#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>

namespace annulus {

class KeyValueStore;

/// Connects the ranks of a mesh, by MPI or by a key-value store. Calls are collective.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  Bootstrap() = default;
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  /// Heartbeats between all ranks, once per `interval`. The first call; it waits under `watchdog`.
  [[nodiscard]] virtual std::shared_ptr<Heartbeats> connect(Watchdog::Seconds interval,
                                                            const Watchdog& watchdog) = 0;
  /// Control calls of all ranks.
  [[nodiscard]] virtual std::shared_ptr<Control> control(const Watchdog& watchdog) = 0;
  /// The ranks `members` of the mesh, in this order. Groups of one call have no rank in common;
  /// `axes`, which are different in every call, name them.
  [[nodiscard]] virtual std::unique_ptr<Group> group(std::vector<int> members,
                                                     const std::string& axes,
                                                     const Watchdog& watchdog) = 0;
  /// Why its groups carry short messages only, and no data between CPUs; "" if they carry any.
  [[nodiscard]] virtual std::string obstacle() const { return {}; }
};

/// By control messages on a store that all ranks share. A rank asks the store as long as it waits,
/// about 50 times a second; control calls send O(log P) messages per rank, as over MPI. Groups
/// move messages shorter than KeyValueStore::kMaximumBytes, and refuse longer ones with an
/// UnsupportedError. Throws ArgumentError for a rank that is not one of `size`.
[[nodiscard]] std::unique_ptr<Bootstrap> make_store_bootstrap(std::shared_ptr<KeyValueStore> store,
                                                              int rank, int size);

}  // namespace annulus
