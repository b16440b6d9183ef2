#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {
namespace {

TEST(Watchdog, ReturnsOnceDone) {
  int polls = 0;
  const Watchdog watchdog{Watchdog::Seconds(30)};
  watchdog.wait([&] { return ++polls == 3000; }, [] { return std::string("never shown"); });
  EXPECT_EQ(polls, 3000);
  EXPECT_EQ(watchdog.timeout().count(), 30.0);
}

TEST(Watchdog, TimesOutWithTheDescription) {
  const Watchdog watchdog{Watchdog::Seconds(0.1)};
  const auto begin = std::chrono::steady_clock::now();
  try {
    watchdog.wait([] { return false; }, [] { return std::string("step 2: waiting for rank 1"); });
    FAIL() << "no timeout";
  } catch (const TimeoutError& error) {
    EXPECT_STREQ(error.what(), "step 2: waiting for rank 1 (no progress for 0.1 s)");
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(waited.count(), 0.1);
}

TEST(Watchdog, CountsSilenceOnly) {
  class Signs final : public LifeSigns {
   public:
    void give() override { ++given; }
    bool heard() override { return left > 0 && --left > 0; }
    int given = 0;
    int left = 4000;
  };
  const auto signs = std::make_shared<Signs>();
  const Watchdog watchdog(Watchdog::Seconds(0.05), signs);
  const auto begin = std::chrono::steady_clock::now();
  // Signs of life keep the wait alive well beyond the timeout; when they end, so does it.
  EXPECT_THROW(watchdog.wait([] { return false; }, [] { return std::string("x"); }), TimeoutError);
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(signs->left, 0);
  EXPECT_GE(waited.count(), 0.15);
  EXPECT_EQ(signs->given, 0);  // a rank that waits says nothing
  watchdog.give_life_sign();
  EXPECT_EQ(signs->given, 1);
}

TEST(Watchdog, TimeoutsArePositiveAndAtMostAYear) {
  using Seconds = Watchdog::Seconds;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double bad : {0.0, -1.0, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(Watchdog{Seconds(bad)}, ArgumentError) << bad;
  }
  for (const double long_enough : {1e10, 1e300, kInfinity}) {
    EXPECT_EQ(Watchdog{Seconds(long_enough)}.timeout(), Watchdog::kLongest);
  }
}

class CountedSigns final : public LifeSigns {
 public:
  explicit CountedSigns(bool any_thread) : any_thread_(any_thread) {}
  void give() override { ++given; }
  bool heard() override { return false; }
  [[nodiscard]] bool any_thread_may_give() const override { return any_thread_; }
  std::atomic<int> given = 0;

 private:
  bool any_thread_;
};

TEST(Watchdog, ComputingGivesSignsUntilItEnds) {
  const auto signs = std::make_shared<CountedSigns>(true);
  const Watchdog watchdog(Watchdog::Seconds(1), signs);
  {
    const Computing computing = watchdog.computing();
    const auto begin = std::chrono::steady_clock::now();
    while (signs->given < 3 &&
           std::chrono::steady_clock::now() - begin < std::chrono::seconds(20)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_GE(signs->given, 3);
  }
  const int given = signs->given;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(signs->given, given);
}

TEST(Watchdog, WhatMightHangGivesSignsForSomeTimeOnly) {
  const auto signs = std::make_shared<CountedSigns>(true);
  const Watchdog watchdog(Watchdog::Seconds(1), signs);
  const Computing computing = watchdog.computing(0.2);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const int given = signs->given;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(signs->given, given);
}

TEST(Watchdog, OtherThreadsGiveNoSignsThatTheyMayNot) {
  const auto signs = std::make_shared<CountedSigns>(false);
  const Watchdog watchdog(Watchdog::Seconds(1), signs);
  const Computing computing = watchdog.computing();
  const Computing nobody = Watchdog(Watchdog::Seconds(1)).computing();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(signs->given, 0);
}

TEST(Watchdog, LetsErrorsThrough) {
  const Watchdog watchdog{Watchdog::Seconds(30)};
  EXPECT_THROW(watchdog.wait([]() -> bool { throw LibraryError("transport"); },
                             [] { return std::string(); }),
               LibraryError);
}

}  // namespace
}  // namespace annulus
