#pragma once

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace annulus {

/// Messages that tell waiting ranks which ranks are alive, and that some rank computes.
class Heartbeats {
 public:
  virtual ~Heartbeats() = default;
  enum class State { waiting, computing };
  /// Takes heartbeats that have arrived, and sends heartbeats that are due. The rate is limited, so
  /// it is cheap enough for a kernel's loop. Never blocks.
  virtual void beat(State state) = 0;
  /// Returns the mesh ranks that a wait is for.
  using Peers = std::function<std::vector<int>()>;
  /// Seconds since any rank is known to have computed or, if longer, since one of `peers` (which
  /// may be empty) was last heard. As of the last beat().
  [[nodiscard]] virtual double silence(const Peers& peers) = 0;
  /// Ranks of the mesh that are silent, for messages.
  [[nodiscard]] virtual std::vector<int> silent_ranks() { return {}; }
  /// True if another thread may beat() while the main thread does not communicate.
  [[nodiscard]] virtual bool any_thread_may_beat() const { return false; }
};

/// Sends heartbeats from a separate thread until the object ends: see Watchdog::computing().
class Computing {
 public:
  /// For at most `most`. Does nothing unless any thread may send heartbeats.
  Computing(std::shared_ptr<Heartbeats> heartbeats, std::chrono::duration<double> most);
  ~Computing();
  Computing(const Computing&) = delete;
  Computing& operator=(const Computing&) = delete;

 private:
  class Thread;
  std::unique_ptr<Thread> thread_;
};

/// Bounds every wait for another rank or device. Waiting polls: first spinning, then yielding the
/// core, then sleeping for short spells, so that oversubscribed ranks do not starve each other.
///
/// The timeout limits silence, not work. It does not expire while some rank reports that it is
/// computing, however unevenly the work is distributed, unless an awaited rank reports nothing at
/// all. Waiting ranks report that they are alive.
class Watchdog {
 public:
  using Seconds = std::chrono::duration<double>;
  /// The default timeout, long enough for thousands of ranks to start.
  static constexpr Seconds kDefault{300};
  /// A year: longer timeouts, even infinite ones, are cut to this, which clocks can still add.
  static constexpr Seconds kLongest{365.0 * 24 * 3600};

  /// Throws ArgumentError unless `timeout` is positive.
  explicit Watchdog(Seconds timeout, std::shared_ptr<Heartbeats> heartbeats = nullptr);

  [[nodiscard]] Seconds timeout() const noexcept { return timeout_; }

  /// A computing rank calls it now and then.
  void beat(Heartbeats::State state = Heartbeats::State::computing) const {
    if (heartbeats_) heartbeats_->beat(state);
  }

  /// While the result lives, heartbeats are sent without calls to the watchdog: for a rank that
  /// computes without a stream (an oracle), reads files, or waits for a disk or a GPU. Meanwhile it
  /// must not communicate. The heartbeats stop after `timeouts` timeouts, as the work might hang.
  /// Without MPI_THREAD_SERIALIZED, none are sent.
  [[nodiscard]] Computing computing(
      double timeouts = std::numeric_limits<double>::infinity()) const {
    return {heartbeats_, timeouts * timeout_};
  }

  using Peers = Heartbeats::Peers;
  /// Polls `done` until it returns true. Throws TimeoutError with the text of `describe` ("step 2:
  /// waiting for …") when neither the end nor a heartbeat of a computing rank came within the
  /// timeout, or when one of `peers`, the ranks that the wait is for, has been silent for the whole
  /// timeout. Throws InterruptedError as set_interruption() says.
  void wait(const std::function<bool()>& done, const std::function<std::string()>& describe,
            const Peers& peers = {}) const;

 private:
  Seconds timeout_;
  std::shared_ptr<Heartbeats> heartbeats_;
};

}  // namespace annulus
