#include <chrono>

#include <fmt/format.h>

#include <annulus/core/device_wait.hpp>
#include <annulus/core/error.hpp>

namespace annulus {

void wait_for_device(const DeviceQueue& queue, const Waiting& waiting, const Watchdog& watchdog) {
  using Clock = std::chrono::steady_clock;
  // The watchdog's sleeps would delay a call of a few milliseconds.
  constexpr std::chrono::milliseconds kSpin{20};
  const auto spin_until = Clock::now() + kSpin;
  bool done = queue.idle();
  while (!done && Clock::now() < spin_until) done = queue.idle();

  const auto moved = [&] { return waiting.moved ? waiting.moved() : queue.moved(); };
  const auto describe = [&] { return waiting.describe ? waiting.describe() : queue.description; };
  const Watchdog::Seconds most = kComputingTimeouts * watchdog.timeout();
  std::uint64_t before = moved();
  auto moved_at = Clock::now();
  while (!done) {
    const auto beat_due = Clock::now() + watchdog.timeout() / 8;
    bool computing = false;
    watchdog.wait(
        [&] {
          if (waiting.check) waiting.check();
          done = queue.idle();
          computing = Clock::now() > beat_due && waiting.computing && waiting.computing();
          return done || computing || moved() != before;
        },
        describe);
    if (const std::uint64_t now = moved(); now != before) {
      before = now;
      moved_at = Clock::now();
    } else if (!done && Clock::now() - moved_at > most) {
      throw TimeoutError(fmt::format("{}: nothing has finished for {:g} s; does a kernel hang?",
                                     describe(), most.count()));
    }
    watchdog.beat();
  }
}

}  // namespace annulus
