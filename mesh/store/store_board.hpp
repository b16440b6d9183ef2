#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/key_value_store.hpp>

namespace annulus {

/// Heartbeats on a key-value store: every rank keeps its state under one key, where ranks that wait
/// for it read it. A computing rank also renews a key that all waiting ranks read. A rank calls the
/// store O(1) times per interval. Thread-safe.
class StoreBoard final : public Heartbeats {
 public:
  /// `interval`, in seconds, between two heartbeats.
  StoreBoard(std::shared_ptr<KeyValueStore> store, std::string prefix, int rank, int size,
             double interval);
  /// This rank's state stays on the store until the next mesh is made.
  ~StoreBoard() override;

  void beat(State state) override;
  [[nodiscard]] double silence(const Peers& peers) override;
  [[nodiscard]] std::vector<int> silent_ranks() override;
  [[nodiscard]] bool any_thread_may_beat() const override { return true; }

  /// Sets the mesh rank that this rank waits for; −1: none.
  void wait_for(int awaited);
  /// Follows the chain of ranks that wait for each other to the missing rank at its end; nothing if
  /// the chain is a circle. A rank is missing if its state does not change for `patience` seconds.
  /// Ranks that ask later read the answer from this rank's state.
  [[nodiscard]] std::optional<int> absent(int awaited, double patience);
  /// Ends this process with `exit_code`, and other processes once they wait for it.
  [[noreturn]] void abort(int exit_code) noexcept;

 private:
  enum class Kind : std::int32_t { computing, waiting, gave_up, aborted };
  struct Entry {
    std::uint32_t number = 0;  ///< of the heartbeat
    Kind kind = Kind::computing;
    /// waiting: the awaited rank; gave_up: the missing rank, −1 if none; aborted: the exit code
    std::int32_t value = -1;
  };
  struct Seen {
    std::uint32_t number = 0;
    double heard = 0;  ///< when the number was new
  };

  [[nodiscard]] std::string key_of(int rank) const;
  [[nodiscard]] Entry read(int rank);
  void publish(Kind kind, int value);
  void look(const Peers& peers, double now);
  [[nodiscard]] std::optional<int> follow(int awaited, double patience);

  static constexpr double kNever = -std::numeric_limits<double>::infinity();

  std::shared_ptr<KeyValueStore> store_;
  std::string prefix_;
  int rank_;
  int size_;
  double interval_;
  std::atomic<std::uint32_t> number_ = 0;  // abort() needs it in any state
  std::mutex mutex_;                       // guards all members below
  int awaited_ = -1;
  double sent_ = kNever;
  double looked_ = kNever;
  double computed_ = kNever;         // when a rank was last known to compute …
  std::optional<std::string> sign_;  // … by this value
  std::map<int, Seen> seen_;         // ranks that this one has waited for …
  std::vector<int> watched_;         // … and does now
};

}  // namespace annulus
