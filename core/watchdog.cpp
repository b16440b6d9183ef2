#include <thread>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

void Watchdog::wait(const std::function<bool()>& done,
                    const std::function<std::string()>& describe) const {
  using Clock = std::chrono::steady_clock;
  constexpr int kSpins = 200;
  constexpr int kYields = 2000;
  constexpr std::chrono::microseconds kSleep{50};
  if (done()) return;
  auto silent_since = Clock::now();
  for (int poll = 1;; ++poll) {
    if (done()) return;
    if (poll <= kSpins) continue;
    if (life_signs_ && life_signs_->heard()) silent_since = Clock::now();
    if (Clock::now() - silent_since > timeout_) {
      throw TimeoutError(fmt::format("{} (no progress for {:g} s)", describe(), timeout_.count()));
    }
    if (poll <= kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }
}

}  // namespace annulus
