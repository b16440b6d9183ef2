#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>

#include <annulus/core/watchdog.hpp>

namespace annulus {

/// Watches calls on a device for callers who do not wait through this library: a caller who
/// synchronises his own stream would wait for a lost rank for ever. A thread reads marks that the
/// device writes into host memory, so watching adds no time to calls. When a call makes no progress
/// for the timeout, the thread releases the work that waits for other ranks, on all watched
/// objects; check() throws from then on.
///
/// The thread does not communicate, because MPI may permit only one thread at a time. So it
/// receives no heartbeats, and the timeout counts from the last progress of this rank's own device.
class CallWatch {
 public:
  /// The calls of one object. The thread calls all these functions until the Watched object ends.
  struct Calls {
    std::function<bool()> under_way;        ///< exchanges have begun and not ended
    std::function<std::uint64_t()> moved;   ///< changes with progress
    std::function<bool()> computing;        ///< no peer is waited for: see kComputingTimeouts
    std::function<std::string()> describe;  ///< "step 2: waiting for key: 8 bytes from rank 1"
    std::function<void()> release;          ///< ends the waits for other ranks; must not throw
  };

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    Calls calls;
    std::uint64_t moved = 0;
    Clock::time_point since;      // the time of the last progress
    std::atomic<int> paused = 0;  // a thread waits under its own watchdog
  };

 public:
  class Watched {
   public:
    Watched(CallWatch& watch, Calls calls);
    ~Watched();
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;

   private:
    friend class CallWatch;
    CallWatch& watch_;
    std::list<Entry>::iterator entry_;
  };
  /// While a Pause lives, the calls are not watched.
  class Pause {
   public:
    explicit Pause(Watched& watched) noexcept : entry_(*watched.entry_) { ++entry_.paused; }
    ~Pause() { --entry_.paused; }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    Entry& entry_;
  };

  explicit CallWatch(Watchdog::Seconds timeout) : timeout_(timeout) {}
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  /// Throws the TimeoutError of the call that made no progress, if there was one.
  void check() const;

 private:
  void run();
  void look();
  void fail(const Entry& entry);

  const Watchdog::Seconds timeout_;
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::list<Entry> entries_;
  std::string failure_;
  std::atomic<bool> failed_ = false;  // failure_ does not change any more
  std::thread thread_;                // from the first entry on
};

}  // namespace annulus
