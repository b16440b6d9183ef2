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

  /// Connects the ranks, waiting under `watchdog`, and returns their heartbeats, one per
  /// `interval`. Must be the first call.
  [[nodiscard]] virtual std::shared_ptr<Heartbeats> connect(Watchdog::Seconds interval,
                                                            const Watchdog& watchdog) = 0;
  /// Control calls of all ranks.
  [[nodiscard]] virtual std::shared_ptr<Control> control(const Watchdog& watchdog) = 0;
  /// Makes a group of the ranks `members` of the mesh, in this order. In one call, ranks may make
  /// different groups that have no rank in common. `axes` names the groups of a call, so it differs
  /// in every call.
  [[nodiscard]] virtual std::unique_ptr<Group> group(std::vector<int> members,
                                                     const std::string& axes,
                                                     const Watchdog& watchdog) = 0;
  /// The reason why groups carry only short messages, and no data between CPUs; "" if they carry
  /// messages of any size.
  [[nodiscard]] virtual std::string obstacle() const { return {}; }
};

/// Connects the ranks by control messages on a store that all of them share. A waiting rank polls
/// the store about 50 times a second; control calls send O(log P) messages per rank, as over MPI.
/// Groups move messages shorter than KeyValueStore::kMaximumBytes, and refuse longer ones with an
/// UnsupportedError. Throws ArgumentError for a rank that is not one of `size`.
[[nodiscard]] std::unique_ptr<Bootstrap> make_store_bootstrap(std::shared_ptr<KeyValueStore> store,
                                                              int rank, int size);

}  // namespace annulus
