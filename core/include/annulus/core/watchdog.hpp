#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace annulus {

/// How a rank that computes tells those that wait for it that it is alive.
class LifeSigns {
 public:
  virtual ~LifeSigns() = default;
  /// Says "alive" to the others, at most every so often: cheap enough for a kernel's loop.
  virtual void give() = 0;
  /// Whether any other rank has said so since the last call. Never blocks.
  virtual bool heard() = 0;
};

/// Bounds every wait for another rank or device. Waiting polls: first spinning, then yielding the
/// core, then sleeping for short spells, so that oversubscribed ranks do not starve each other.
///
/// What counts is silence: as long as some rank says that it is still computing, waiting for it is
/// no failure, however uneven the work. A rank that waits says nothing.
class Watchdog {
 public:
  using Seconds = std::chrono::duration<double>;

  explicit Watchdog(Seconds timeout, std::shared_ptr<LifeSigns> life_signs = nullptr)
      : timeout_(timeout), life_signs_(std::move(life_signs)) {}

  [[nodiscard]] Seconds timeout() const noexcept { return timeout_; }

  /// Called now and then by a rank that computes.
  void give_life_sign() const {
    if (life_signs_) life_signs_->give();
  }

  /// Polls `done` until it returns true. Throws TimeoutError with the text of `describe` ("step 2:
  /// waiting for …") once there was neither an end nor a sign of life for the timeout.
  void wait(const std::function<bool()>& done, const std::function<std::string()>& describe) const;

 private:
  Seconds timeout_;
  std::shared_ptr<LifeSigns> life_signs_;
};

}  // namespace annulus
