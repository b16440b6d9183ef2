#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <utility>
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

/// A thread that runs one job after the other.
class Worker {
 public:
  Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  /// Must be idle.
  ~Worker() {
    change([this] { ends_ = true; });
  }

  /// Must be idle.
  void start(std::function<void()> job) noexcept {
    change([&] { job_ = std::move(job); });
  }
  /// Until it is idle.
  void wait() noexcept {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !job_; });
  }

 private:
  template <class Change>
  void change(const Change& change) noexcept {
    {
      const std::lock_guard lock(mutex_);
      change();
    }
    changed_.notify_one();
  }

  void run() {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return job_ || ends_; });
      }
      if (ends_) return;
      job_();
      change([this] { job_ = nullptr; });
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;  // either the worker waits for it, or its owner
  std::function<void()> job_;        // none while it is idle
  bool ends_ = false;
  std::jthread thread_{[this] { run(); }};
};

using Workers = std::vector<std::unique_ptr<Worker>>;

// Workers of earlier calls on this thread, since 15 threads take 0.7 ms to start.
thread_local Workers idle_workers;
thread_local pid_t owner_of_idle_workers = 0;

Workers take_idle_workers() {
  Workers workers = std::exchange(idle_workers, {});
  if (!workers.empty() && owner_of_idle_workers != getpid()) {
    // The child of a fork has its parent's objects but not their threads, so destructors would wait
    // for ever.
    for (std::unique_ptr<Worker>& worker : workers) (void)worker.release();
    workers.clear();
  }
  return workers;
}

void keep_idle_workers(Workers workers) {
  idle_workers = std::move(workers);
  owner_of_idle_workers = getpid();
}

}  // namespace

void parallel_for(std::int64_t tasks, int workers,
                  const std::function<void(std::int64_t task, int worker)>& body,
                  const std::function<void()>& wait) {
  TaskQueue queue(tasks, body);
  const int others = workers - 1;
  std::atomic<int> busy = others;
  // Taken from the list, because `body` may call parallel_for() again.
  Workers threads = take_idle_workers();
  while (static_cast<int>(threads.size()) < others) threads.push_back(std::make_unique<Worker>());
  // Each worker wakes two others before it works, since waking one takes a while.
  const std::function<void(int)> work = [&](int worker) {
    for (int next = 2 * worker + 1; next <= 2 * worker + 2 && next <= others; ++next) {
      threads[static_cast<std::size_t>(next - 1)]->start([&work, next] { work(next); });
    }
    queue.work(worker);
    if (worker > 0) --busy;
  };
  work(0);
  queue.attempt([&] {
    if (!wait) return;
    for (wait(); busy > 0 && !queue.failed(); wait()) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  // This order works, since each worker was woken before its waker became idle.
  for (int worker = 1; worker <= others; ++worker) {
    threads[static_cast<std::size_t>(worker - 1)]->wait();
  }
  keep_idle_workers(std::move(threads));
  queue.rethrow();
}

}  // namespace annulus
