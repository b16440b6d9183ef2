#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/device_wait.hpp>
#include <annulus/core/error.hpp>

#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

constexpr Watchdog::Seconds kTimeout{0.1};

class DeviceWait : public ::testing::Test {
 protected:
  [[nodiscard]] Watchdog::Seconds elapsed() const { return Clock::now() - begin_; }
  /// A queue that is idle after `seconds`, and until `last` moves every `step` seconds.
  [[nodiscard]] DeviceQueue queue(double seconds, double step, double last) const {
    return {[this, seconds] { return elapsed().count() > seconds; },
            [this, step, last] {
              return static_cast<std::uint64_t>(std::min(elapsed().count(), last) / step);
            },
            "compute: waiting for cuda:0"};
  }
  std::string timeout_of(const DeviceQueue& queue, const Waiting& waiting,
                         Watchdog::Seconds timeout = kTimeout) {
    begin_ = Clock::now();
    return test::message_of<TimeoutError>(
        [&] { wait_for_device(queue, waiting, Watchdog(timeout)); });
  }

 private:
  Clock::time_point begin_ = Clock::now();
};

constexpr double kNever = 1e9;

TEST_F(DeviceWait, EndsWhenTheQueueIsIdle) {
  EXPECT_EQ(timeout_of(queue(0.01, 1, 0), {}), "nothing thrown");
  EXPECT_EQ(timeout_of(queue(0.05, 1, 0), {}), "nothing thrown");
}

TEST_F(DeviceWait, SilenceIsATimeout) {
  EXPECT_THAT(timeout_of(queue(kNever, 1, 0), {}),
              StartsWith("compute: waiting for cuda:0 (no progress for 0.1 s"));
  EXPECT_GE(elapsed(), kTimeout);
  EXPECT_LT(elapsed(), kComputingTimeouts * kTimeout);
}

// A busy machine may keep this thread waiting for longer than kTimeout.
TEST_F(DeviceWait, WorkThatMovesOnMayTakeItsTime) {
  EXPECT_EQ(timeout_of(queue(1.5, 0.03, kNever), {}, Watchdog::Seconds(0.5)), "nothing thrown");
  EXPECT_GE(elapsed().count(), 1.5);
}

TEST_F(DeviceWait, OwnWorkMayBeSilentForLonger) {
  Waiting waiting;
  waiting.computing = [] { return true; };
  EXPECT_EQ(timeout_of(queue(6 * kTimeout.count(), 1, 0), waiting), "nothing thrown");
}

TEST_F(DeviceWait, AHungKernelIsFoundOut) {
  Waiting waiting;
  waiting.computing = [] { return true; };
  waiting.describe = [] { return std::string("waiting for cuda:0 to compute"); };
  const std::string text = timeout_of(queue(kNever, 1, 0), waiting);
  EXPECT_THAT(text, StartsWith("waiting for cuda:0 to compute: nothing has finished for 2 s"));
  EXPECT_THAT(text, HasSubstr("does a kernel hang?"));
  EXPECT_GE(elapsed(), kComputingTimeouts * kTimeout);
}

TEST_F(DeviceWait, TheLastSignOfProgressCounts) {
  Waiting waiting;
  waiting.computing = [] { return true; };
  EXPECT_THAT(timeout_of(queue(kNever, 0.2, 0.7), waiting), HasSubstr("nothing has finished"));
  EXPECT_GE(elapsed().count(), 0.6 + kComputingTimeouts * kTimeout.count());
}

TEST_F(DeviceWait, ErrorsOfADeviceComeThrough) {
  DeviceQueue lost = queue(kNever, 1, 0);
  lost.idle = []() -> bool { throw LibraryError("the device is lost"); };
  EXPECT_THROW(wait_for_device(lost, {}, Watchdog(kTimeout)), LibraryError);
  Waiting waiting;
  waiting.check = [] { throw LibraryError("the transport has failed"); };
  EXPECT_THROW(wait_for_device(queue(kNever, 1, 0), waiting, Watchdog(kTimeout)), LibraryError);
}

}  // namespace
}  // namespace annulus
