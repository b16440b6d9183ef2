#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace annulus {

/// Bounds every wait for another rank or device. Waiting polls: first spinning, then yielding the
/// core, then sleeping for short spells, so that oversubscribed ranks do not starve each other.
class Watchdog {
 public:
  using Seconds = std::chrono::duration<double>;

  explicit Watchdog(Seconds timeout) : timeout_(timeout) {}

  [[nodiscard]] Seconds timeout() const noexcept { return timeout_; }

  /// Polls `done` until it returns true. Throws TimeoutError with the text of `describe` ("step 2:
  /// waiting for …") once the timeout has passed.
  void wait(const std::function<bool()>& done, const std::function<std::string()>& describe) const;

 private:
  Seconds timeout_;
};

}  // namespace annulus
