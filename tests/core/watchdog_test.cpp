#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/watchdog.hpp>

#include "tests/support/message_of.hpp"

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
  EXPECT_EQ(test::message_of<TimeoutError>([&] {
              watchdog.wait([] { return false; },
                            [] { return std::string("step 2: waiting for rank 1"); });
            }),
            "step 2: waiting for rank 1 (no progress for 0.1 s)");
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(waited.count(), 0.1);
}

TEST(Watchdog, IsInterrupted) {
  static int questions = 0;
  set_interruption([] { return ++questions == 3 ? 1 : 0; });
  const Watchdog watchdog{Watchdog::Seconds(30)};
  EXPECT_THROW(watchdog.wait([] { return false; }, [] { return std::string("step 2"); }),
               InterruptedError);
  EXPECT_EQ(questions, 3);
  set_interruption(nullptr);
  int polls = 0;
  watchdog.wait([&] { return ++polls == 3000; }, [] { return std::string("never shown"); });
  EXPECT_EQ(questions, 3);
}

TEST(Watchdog, CountsSilenceOnly) {
  class Beats final : public Heartbeats {
   public:
    void beat(State state) override { ++(state == State::computing ? computing : waiting); }
    double silence(const Peers& /*peers*/) override { return left > 0 && --left > 0 ? 0 : 1e9; }
    int computing = 0;
    int waiting = 0;
    int left = 4000;
  };
  const auto beats = std::make_shared<Beats>();
  const Watchdog watchdog(Watchdog::Seconds(0.05), beats);
  const auto begin = std::chrono::steady_clock::now();
  // Heartbeats keep the wait alive well beyond the timeout; when they end, so does it.
  EXPECT_THROW(watchdog.wait([] { return false; }, [] { return std::string("x"); }), TimeoutError);
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(beats->left, 0);
  EXPECT_GE(waited.count(), 0.1);
  EXPECT_GT(beats->waiting, 0);    // a rank that waits is alive …
  EXPECT_EQ(beats->computing, 0);  // … but does not compute
  watchdog.beat();
  EXPECT_EQ(beats->computing, 1);
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

TEST(Watchdog, SilentRanksEndAWaitAndAreNamed) {
  class Beats final : public Heartbeats {
   public:
    void beat(State /*state*/) override {}
    double silence(const Peers& peers) override {
      return peers && peers() == std::vector{7} ? 1e9 : 0;
    }
    std::vector<int> silent_ranks() override { return {7, 9}; }
  };
  const Watchdog watchdog(Watchdog::Seconds(0.1), std::make_shared<Beats>());
  EXPECT_EQ(test::message_of<TimeoutError>([&] {
              watchdog.wait([] { return false; }, [] { return std::string("step 2"); },
                            [] { return std::vector{7}; });
            }),
            "step 2 (no progress for 0.1 s); no heartbeat from rank 7, rank 9");
}

class CountedBeats final : public Heartbeats {
 public:
  explicit CountedBeats(bool any_thread) : any_thread_(any_thread) {}
  void beat(State state) override {
    if (state == State::computing) ++sent;
  }
  double silence(const Peers& /*peers*/) override { return 1e9; }
  [[nodiscard]] bool any_thread_may_beat() const override { return any_thread_; }
  std::atomic<int> sent = 0;

 private:
  bool any_thread_;
};

TEST(Watchdog, ComputingSendsHeartbeatsUntilItEnds) {
  const auto beats = std::make_shared<CountedBeats>(true);
  const Watchdog watchdog(Watchdog::Seconds(1), beats);
  {
    const Computing computing = watchdog.computing();
    const auto begin = std::chrono::steady_clock::now();
    while (beats->sent < 3 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_GE(beats->sent, 3);
  }
  const int sent = beats->sent;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(beats->sent, sent);
}

TEST(Watchdog, WorkThatMightHangSendsHeartbeatsForSomeTimeOnly) {
  const auto beats = std::make_shared<CountedBeats>(true);
  const Watchdog watchdog(Watchdog::Seconds(1), beats);
  const Computing computing = watchdog.computing(0.2);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const int sent = beats->sent;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(beats->sent, sent);
}

TEST(Watchdog, OtherThreadsSendNoHeartbeatsThatTheyMayNot) {
  const auto beats = std::make_shared<CountedBeats>(false);
  const Watchdog watchdog(Watchdog::Seconds(1), beats);
  const Computing computing = watchdog.computing();
  const Computing nobody = Watchdog(Watchdog::Seconds(1)).computing();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(beats->sent, 0);
}

TEST(Watchdog, LetsErrorsThrough) {
  const Watchdog watchdog{Watchdog::Seconds(30)};
  EXPECT_THROW(watchdog.wait([]() -> bool { throw LibraryError("transport"); },
                             [] { return std::string(); }),
               LibraryError);
}

}  // namespace
}  // namespace annulus
