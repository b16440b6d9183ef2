#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/key_value_store.hpp>

#include "control/messenger.hpp"
#include "store/store_board.hpp"

namespace annulus {

/// The ranks of a group on a store.
struct StoreRanks {
  std::shared_ptr<KeyValueStore> store;
  std::shared_ptr<StoreBoard> board;  ///< of the mesh
  std::string prefix;                 ///< of the group's keys
  std::vector<int> members;           ///< mesh ranks, by rank in the group
  int rank = 0;                       ///< of this process in the group

  [[nodiscard]] int size() const noexcept { return static_cast<int>(members.size()); }
  /// The mesh rank of a rank of the group.
  [[nodiscard]] int member(int peer) const { return members[static_cast<std::size_t>(peer)]; }
  /// "rank 1", by its number in the mesh.
  [[nodiscard]] std::string name_of(int peer) const;
};

/// Messages from rank to rank of a group, numbered in the order in which they are sent. Each has a
/// key of its own until its receiver takes it off the store.
class StoreQueue {
 public:
  /// `kind` distinguishes this queue from other queues of the group.
  StoreQueue(std::shared_ptr<const StoreRanks> ranks, std::string kind)
      : ranks_(std::move(ranks)), kind_(std::move(kind)) {}

  /// Puts the next message to a rank on the store.
  void put(int to, const std::string& message);
  /// False if the limit of unreceived messages to this rank is reached.
  [[nodiscard]] bool has_room(int to) const;
  /// The next message from a rank, if it comes within this time.
  [[nodiscard]] std::optional<std::string> take(int from, double seconds);

 private:
  [[nodiscard]] std::string key_of(int from, int to, std::uint64_t number) const;

  std::shared_ptr<const StoreRanks> ranks_;
  std::string kind_;
  std::map<int, std::uint64_t> sent_;      // by receiver
  std::map<int, std::uint64_t> received_;  // by sender
};

/// Sends the texts of control calls by the store.
class StoreMessenger final : public Messenger {
 public:
  StoreMessenger(std::shared_ptr<const StoreRanks> ranks, Watchdog watchdog);

  [[nodiscard]] int rank() const noexcept override { return ranks_->rank; }
  [[nodiscard]] int size() const noexcept override { return ranks_->size(); }
  [[nodiscard]] int mesh_rank(int rank) const override { return ranks_->member(rank); }
  [[nodiscard]] std::string name_of(int rank) const override { return ranks_->name_of(rank); }
  void send(std::string_view what, std::span<const int> to, const std::string& text) override;
  [[nodiscard]] std::string receive(const Call& call, int from) override;
  [[nodiscard]] Computing computing(double timeouts) const override {
    return watchdog_.computing(timeouts);
  }
  [[noreturn]] void abort(int exit_code) noexcept override { ranks_->board->abort(exit_code); }

 private:
  void put(std::string_view what, int to, const std::string& message);
  [[nodiscard]] std::string take(const Call& call, int from);
  void wait(const Call& call, int peer, const std::function<bool()>& done);
  [[nodiscard]] std::string describe_wait(const Call& call, int peer);

  std::shared_ptr<const StoreRanks> ranks_;
  Watchdog watchdog_;
  StoreQueue queue_;
};

}  // namespace annulus
