#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/key_value_store.hpp>

#include "face/c/handles.hpp"

namespace annulus::c {
namespace {

thread_local std::string reason;  // of a failed call of a store

/// A thread for calls that may hang, or that must not see the signals of the main thread. It
/// outlives its owner if a call hangs.
class CallThread {
 public:
  CallThread() {
    std::thread([state = state_] {
      for (std::unique_lock lock(state->mutex);;) {
        state->changed.wait(lock, [&] { return state->ended || !state->tasks.empty(); });
        if (state->tasks.empty()) return;
        const auto task = std::move(state->tasks.front());
        state->tasks.pop_front();
        lock.unlock();
        task();
        lock.lock();
      }
    }).detach();
  }
  ~CallThread() {
    const std::lock_guard lock(state_->mutex);
    state_->ended = true;
    state_->changed.notify_one();
  }
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  /// Returns the result of `call`, which must own all data that it uses. Throws TimeoutError with
  /// the name of the call if it takes longer than `timeout` seconds, or InterruptedError.
  template <class Call>
  auto run(const std::string& name, double timeout, Call call) const {
    using Task = std::packaged_task<decltype(call())()>;
    const auto task = std::make_shared<Task>(std::move(call));
    auto result = task->get_future();
    {
      const std::lock_guard lock(state_->mutex);
      state_->tasks.emplace_back([task] { (*task)(); });
      state_->changed.notify_one();
    }
    constexpr std::chrono::milliseconds kBetweenQuestions{50};
    const auto begin = std::chrono::steady_clock::now();
    while (result.wait_for(kBetweenQuestions) != std::future_status::ready) {
      if (interrupted()) throw InterruptedError(name + " (interrupted)");
      if (std::chrono::steady_clock::now() - begin > Watchdog::Seconds(timeout)) {
        throw TimeoutError(fmt::format("{}: no answer for {:g} s", name, timeout));
      }
    }
    return result.get();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;
    bool ended = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// A store of the caller.
class CallersStore final : public KeyValueStore {
 public:
  CallersStore(const annulus_store_calls& calls, std::shared_ptr<const std::atomic<double>> timeout)
      : calls_(calls), timeout_(std::move(timeout)) {}

  void set(const std::string& key, const std::string& value) override {
    call("set", key, [calls = calls_, key, value] {
      return calls.set(calls.user, key.c_str(), value.data(), value.size());
    });
  }
  [[nodiscard]] std::optional<std::string> get(const std::string& key, double seconds) override {
    const auto value = std::make_shared<std::string>();
    const int status = call(
        "get", key,
        [calls = calls_, key, seconds, value] {
          thread_local std::string buffer;
          buffer.resize(kMaximumBytes);
          std::size_t bytes = 0;
          const int found =
              calls.get(calls.user, key.c_str(), seconds, buffer.data(), buffer.size(), &bytes);
          if (found == 0) value->assign(buffer, 0, bytes);
          return found;
        },
        true);
    if (status == ANNULUS_STORE_NO_VALUE) return {};
    return *value;
  }
  void remove(const std::string& key) override {
    call("remove", key, [calls = calls_, key] { return calls.remove(calls.user, key.c_str()); });
  }

 private:
  // Returns 0, or ANNULUS_STORE_NO_VALUE if this is allowed.
  template <class Body>
  int call(const char* what, const std::string& key, Body body, bool may_miss = false) {
    const std::string name = fmt::format("key-value store: {} of {}", what, key);
    return thread_.run(name, *timeout_, [name, may_miss, body = std::move(body)] {
      reason.clear();
      const int status = body();
      if (status == 0 || (status == ANNULUS_STORE_NO_VALUE && may_miss)) return status;
      throw LibraryError(
          fmt::format("{}: {}", name, reason.empty() ? fmt::format("error {}", status) : reason));
    });
  }

  annulus_store_calls calls_;
  std::shared_ptr<const std::atomic<double>> timeout_;
  CallThread thread_;
};

}  // namespace
}  // namespace annulus::c

using annulus::c::checked;
using annulus::c::guarded;

void annulus_store_set_error(const char* text) {
  try {
    annulus::c::reason = text != nullptr ? text : "";
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for it
  }
}

annulus_status annulus_store_create(const annulus_store_calls* calls, int rank, int size,
                                    annulus_store** store) {
  return guarded([&] {
    const annulus_store_calls& given = checked(calls, "calls");
    if (given.set == nullptr || given.get == nullptr || given.remove == nullptr) {
      throw annulus::ArgumentError("calls", "a null pointer", "set, get and remove");
    }
    const auto timeout = std::make_shared<std::atomic<double>>(annulus::Watchdog::kDefault.count());
    checked(store, "store") = new annulus_store{
        std::make_shared<annulus::c::CallersStore>(given, timeout), timeout, rank, size};
  });
}
void annulus_store_destroy(annulus_store* store) {
  delete store;
}
