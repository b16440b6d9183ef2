#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

class Computing::Thread {
 public:
  Thread(std::shared_ptr<LifeSigns> signs, Watchdog::Seconds most)
      : signs_(std::move(signs)), most_(most), thread_([this] { run(); }) {}
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
    constexpr std::chrono::milliseconds kPause{20};  // give() itself limits the rate
    const auto begin = Clock::now();
    std::unique_lock lock(mutex_);
    while (!end_.wait_for(lock, kPause, [this] { return ended_; })) {
      if (Clock::now() - begin > most_) return;
      try {
        signs_->give();
      } catch (const Error&) {
        return;  // the calls of the main thread will say what is wrong
      }
    }
  }

  std::shared_ptr<LifeSigns> signs_;
  Watchdog::Seconds most_;
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::thread thread_;
};

Computing::Computing(std::shared_ptr<LifeSigns> life_signs, Watchdog::Seconds most) {
  if (life_signs && life_signs->any_thread_may_give()) {
    thread_ = std::make_unique<Thread>(std::move(life_signs), most);
  }
}

Computing::~Computing() = default;

Watchdog::Watchdog(Seconds timeout, std::shared_ptr<LifeSigns> life_signs)
    : timeout_(std::min(timeout, kLongest)), life_signs_(std::move(life_signs)) {
  if (!(timeout.count() > 0)) {  // neither is NaN
    throw ArgumentError("timeout", fmt::format("{:g} s", timeout.count()), "more than 0 s");
  }
}

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
