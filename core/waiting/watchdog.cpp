#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

class Computing::Thread {
 public:
  Thread(std::shared_ptr<Heartbeats> heartbeats, Watchdog::Seconds most)
      : heartbeats_(std::move(heartbeats)), most_(most), thread_([this] { run(); }) {}
  ~Thread() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    end_.notify_one();
    thread_.join();
  }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

 private:
  void run() {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds kPause{20};  // beat() itself limits the rate
    const auto begin = Clock::now();
    std::unique_lock lock(mutex_);
    while (!end_.wait_for(lock, kPause, [this] { return ended_; })) {
      if (Clock::now() - begin > most_) return;
      try {
        heartbeats_->beat(Heartbeats::State::computing);
      } catch (const Error&) {
        return;  // the calls of the main thread report the error
      }
    }
  }

  std::shared_ptr<Heartbeats> heartbeats_;
  Watchdog::Seconds most_;
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::thread thread_;
};

Computing::Computing(std::shared_ptr<Heartbeats> heartbeats, Watchdog::Seconds most) {
  if (heartbeats && heartbeats->any_thread_may_beat()) {
    thread_ = std::make_unique<Thread>(std::move(heartbeats), most);
  }
}

Computing::~Computing() = default;

Watchdog::Watchdog(Seconds timeout, std::shared_ptr<Heartbeats> heartbeats)
    : timeout_(std::min(timeout, kLongest)), heartbeats_(std::move(heartbeats)) {
  if (!(timeout.count() > 0)) {  // false for NaN too
    throw ArgumentError("timeout", fmt::format("{:g} s", timeout.count()), "more than 0 s");
  }
}

namespace {

// "; no heartbeat from rank 7", if there is such a rank.
std::string silent_ranks(Heartbeats* heartbeats) {
  constexpr std::size_t kNamed = 8;
  std::string text;
  if (heartbeats == nullptr) return text;
  const std::vector<int> silent = heartbeats->silent_ranks();
  for (std::size_t i = 0; i < std::min(silent.size(), kNamed); ++i) {
    text += fmt::format("{} rank {}", i == 0 ? "; no heartbeat from" : ",", silent[i]);
  }
  if (silent.size() > kNamed) text += fmt::format(" and {} more", silent.size() - kNamed);
  return text;
}

}  // namespace

void Watchdog::wait(const std::function<bool()>& done, const std::function<std::string()>& describe,
                    const Peers& peers) const {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kSpin{20};  // a poll may take longer
  constexpr int kYields = 2000;
  constexpr std::chrono::microseconds kSleep{50};
  constexpr std::chrono::milliseconds kBetweenQuestions{20};
  if (done()) return;
  const auto silent_since = Clock::now();
  auto question_due = silent_since + kBetweenQuestions;
  for (int poll = 1;; ++poll) {
    if (done()) return;
    const auto now = Clock::now();
    if (now - silent_since < kSpin) continue;
    Seconds silence = now - silent_since;
    if (heartbeats_) {
      heartbeats_->beat(Heartbeats::State::waiting);
      silence = std::min(silence, Seconds(heartbeats_->silence(peers)));
    }
    if (silence > timeout_) {
      throw TimeoutError(fmt::format("{} (no progress for {:g} s){}", describe(), timeout_.count(),
                                     silent_ranks(heartbeats_.get())));
    }
    if (now >= question_due) {
      if (interrupted()) throw InterruptedError(fmt::format("{} (interrupted)", describe()));
      question_due = now + kBetweenQuestions;
    }
    if (poll <= kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }
}

}  // namespace annulus
