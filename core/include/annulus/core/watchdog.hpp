#pragma once

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>

namespace annulus {

/// How a computing rank tells the ranks that wait for it that it is alive.
class LifeSigns {
 public:
  virtual ~LifeSigns() = default;
  /// Tells the other ranks "alive", at a limited rate: cheap enough for a kernel's loop.
  virtual void give() = 0;
  /// Whether any other rank has done so since the last call. Never blocks.
  virtual bool heard() = 0;
  /// Whether another thread may give(), as long as the thread of the other calls does not
  /// communicate.
  [[nodiscard]] virtual bool any_thread_may_give() const { return false; }
};

/// Gives signs of life from a thread of its own until it ends: see Watchdog::computing().
class Computing {
 public:
  /// For at most `most`. Does nothing without life signs that any thread may give.
  Computing(std::shared_ptr<LifeSigns> life_signs, std::chrono::duration<double> most);
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
/// The timeout limits silence, not work: it does not expire while some rank reports that it is
/// still computing, however unevenly the work is distributed. A waiting rank reports nothing.
class Watchdog {
 public:
  using Seconds = std::chrono::duration<double>;
  /// Where nobody says otherwise: thousands of ranks take their time to start.
  static constexpr Seconds kUsual{300};
  /// A year: longer timeouts, infinite ones too, count as this one, which clocks can still add.
  static constexpr Seconds kLongest{365.0 * 24 * 3600};

  /// Throws ArgumentError unless `timeout` is positive.
  explicit Watchdog(Seconds timeout, std::shared_ptr<LifeSigns> life_signs = nullptr);

  [[nodiscard]] Seconds timeout() const noexcept { return timeout_; }

  /// To be called now and then by a computing rank.
  void give_life_sign() const {
    if (life_signs_) life_signs_->give();
  }

  /// While the result lives, the others know that this rank is alive without calling the watchdog:
  /// it computes without a stream (an oracle), reads files, waits for a disk or a GPU. Meanwhile it
  /// must not communicate. The signs stop after `timeouts` timeouts, for work that might hang. If
  /// MPI was started without MPI_THREAD_SERIALIZED, there are none.
  [[nodiscard]] Computing computing(
      double timeouts = std::numeric_limits<double>::infinity()) const {
    return {life_signs_, timeouts * timeout_};
  }

  /// Polls `done` until it returns true. Throws TimeoutError with the text of `describe` ("step 2:
  /// waiting for …") when neither the end nor a sign of life came within the timeout.
  void wait(const std::function<bool()>& done, const std::function<std::string()>& describe) const;

 private:
  Seconds timeout_;
  std::shared_ptr<LifeSigns> life_signs_;
};

}  // namespace annulus
