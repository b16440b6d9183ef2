#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace annulus {

/// A key-value store that all ranks of a job reach, such as torch's TCPStore or the coordination
/// service of JAX: it connects ranks without MPI. Calls may come from any thread, several at a
/// time. They throw LibraryError if the store fails.
///
/// A mesh of P ranks keeps P + 1 short values on the store until all ranks make the next mesh. It
/// also keeps each message until it is received. At most kAhead messages of control calls wait from
/// one rank to another.
///
/// All keys begin with "annulus/". Each group of ranks, and each job on a store that outlives it,
/// must put a prefix of its own before the keys. Each rank uses one object for all its meshes.
class KeyValueStore {
 public:
  /// The longest value.
  static constexpr std::size_t kMaximumBytes = std::size_t{64} << 10;
  /// The limit of messages from one rank to another that have not been received.
  static constexpr int kAhead = 16;

  virtual ~KeyValueStore() = default;
  KeyValueStore() = default;
  KeyValueStore(const KeyValueStore&) = delete;
  KeyValueStore& operator=(const KeyValueStore&) = delete;

  /// Stores a value of any bytes, in place of an earlier one.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits at most `seconds` for a value and returns it; returns nothing if none came.
  [[nodiscard]] virtual std::optional<std::string> get(const std::string& key, double seconds) = 0;
  /// Does nothing if there is no value.
  virtual void remove(const std::string& key) = 0;

 private:
  friend class StoreBoard;
  friend class StoreBootstrap;

  /// The prefix of the keys of a new mesh. All ranks make their meshes on a store in the same
  /// order.
  [[nodiscard]] std::string prefix_of_mesh() {
    return "annulus/" + std::to_string(meshes_++) + '/';
  }

  /// Leaves a key to remove_now(), since other ranks, whose mesh may end later, may still read it.
  void remove_later(std::string key) { to_remove_.push_back(std::move(key)); }
  /// Removes the keys of remove_later(). Call it when all ranks have begun another mesh.
  void remove_now() {
    for (const std::string& key : to_remove_) remove(key);
    to_remove_.clear();
  }

  int meshes_ = 0;
  std::vector<std::string> to_remove_;
};

}  // namespace annulus
