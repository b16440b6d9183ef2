#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <annulus/core/parallel.hpp>

namespace annulus {
namespace {

class TaskQueue {
 public:
  TaskQueue(std::int64_t tasks, const std::function<void(std::int64_t, int)>& body)
      : tasks_(tasks), body_(body) {}

  void work(int worker) noexcept {
    attempt([&] {
      for (std::int64_t task = next_++; task < tasks_ && !failed_; task = next_++) {
        body_(task, worker);
      }
    });
  }

  /// Keeps the first exception of `action` on any thread, and stops the others.
  template <class Action>
  void attempt(const Action& action) noexcept {
    try {
      action();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      failed_ = true;
    }
  }

  [[nodiscard]] bool failed() const noexcept { return failed_; }

  /// Only after every worker has ended.
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::int64_t tasks_;
  const std::function<void(std::int64_t, int)>& body_;
  std::atomic<std::int64_t> next_ = 0;
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void parallel_for(std::int64_t tasks, int workers,
                  const std::function<void(std::int64_t task, int worker)>& body,
                  const std::function<void()>& wait) {
  TaskQueue queue(tasks, body);
  std::atomic<int> busy = workers - 1;
  {
    std::vector<std::jthread> threads;
    queue.attempt([&] {
      for (int worker = 1; worker < workers; ++worker) {
        threads.emplace_back([&queue, &busy, worker] {
          queue.work(worker);
          --busy;
        });
      }
    });
    queue.work(0);
    queue.attempt([&] {
      if (!wait) return;
      for (wait(); busy > 0 && !queue.failed(); wait()) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    });
  }  // joins
  queue.rethrow();
}

}  // namespace annulus
