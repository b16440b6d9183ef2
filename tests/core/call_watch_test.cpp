#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include <annulus/core/call_watch.hpp>
#include <annulus/core/error.hpp>

#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using namespace std::chrono_literals;

constexpr Watchdog::Seconds kTimeout{0.2};

// A device that a test moves by hand. Releasing ends what is under way, as flags and aborts do.
struct FakeDevice {
  std::atomic<bool> under_way = true;
  std::atomic<std::uint64_t> marks = 0;
  std::atomic<bool> computing = false;
  std::atomic<int> releases = 0;

  [[nodiscard]] CallWatch::Calls calls() {
    return {[this] { return under_way.load(); }, [this] { return marks.load(); },
            [this] { return computing.load(); },
            [] { return std::string("step 2: waiting for key: 8 bytes from rank 1"); },
            [this] {
              ++releases;
              under_way = false;
            }};
  }
  // As cudaStreamSynchronize would: it knows no timeout.
  void synchronize() const {
    while (under_way) std::this_thread::sleep_for(1ms);
  }
};

TEST(CallWatch, ReleasesWhoWaitsForALostRankAndNamesIt) {
  CallWatch watch(kTimeout);
  FakeDevice device;
  FakeDevice behind;  // has nothing under way yet
  behind.under_way = false;
  const CallWatch::Watched watched(watch, device.calls());
  const CallWatch::Watched watched_behind(watch, behind.calls());
  watch.check();
  device.synchronize();
  EXPECT_EQ(test::message_of<TimeoutError>([&] { watch.check(); }),
            "step 2: waiting for key: 8 bytes from rank 1 (no progress for 0.2 s)");
  std::this_thread::sleep_for(2 * kTimeout);
  EXPECT_EQ(device.releases, 1);
  EXPECT_EQ(behind.releases, 1);
}

TEST(CallWatch, LeavesCallsAloneThatMoveOrComputeOrAreWaitedFor) {
  CallWatch watch(kTimeout);
  FakeDevice moving;
  FakeDevice computing;
  FakeDevice waited_for;
  FakeDevice idle;
  computing.computing = true;
  idle.under_way = false;
  const CallWatch::Watched one(watch, moving.calls());
  const CallWatch::Watched two(watch, computing.calls());
  CallWatch::Watched three(watch, waited_for.calls());
  const CallWatch::Watched four(watch, idle.calls());
  const CallWatch::Pause pause(three);
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(kTimeout / 10);
    ++moving.marks;
  }
  watch.check();
  EXPECT_EQ(moving.releases + computing.releases + waited_for.releases + idle.releases, 0);
}

TEST(CallWatch, ForgetsObjectsThatHaveEnded) {
  CallWatch watch(kTimeout);
  FakeDevice device;
  { const CallWatch::Watched watched(watch, device.calls()); }
  std::this_thread::sleep_for(3 * kTimeout);
  watch.check();
  EXPECT_EQ(device.releases, 0);
}

}  // namespace
}  // namespace annulus
