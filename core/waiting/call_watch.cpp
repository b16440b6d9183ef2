#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/call_watch.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/stream.hpp>

namespace annulus {

CallWatch::Watched::Watched(CallWatch& watch, Calls calls) : watch_(watch) {
  const std::lock_guard lock(watch_.mutex_);
  const std::uint64_t moved = calls.moved();
  entry_ = watch_.entries_.emplace(watch_.entries_.end());
  entry_->calls = std::move(calls);
  entry_->moved = moved;
  entry_->since = Clock::now();
  if (!watch_.thread_.joinable()) watch_.thread_ = std::thread([&watch] { watch.run(); });
}

CallWatch::Watched::~Watched() {
  const std::lock_guard lock(watch_.mutex_);
  watch_.entries_.erase(entry_);
}

CallWatch::~CallWatch() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  end_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void CallWatch::check() const {
  if (failed_) throw TimeoutError(failure_);
}

void CallWatch::run() {
  constexpr Watchdog::Seconds kMaximumPause{0.1};
  const Watchdog::Seconds pause = std::min(kMaximumPause, timeout_ / 8);
  std::unique_lock lock(mutex_);
  while (!end_.wait_for(lock, pause, [this] { return ended_; }) && !failed_) look();
}

void CallWatch::look() {
  const Clock::time_point now = Clock::now();
  for (Entry& entry : entries_) {
    const std::uint64_t moved = entry.calls.moved();
    if (moved != entry.moved || entry.paused > 0 || !entry.calls.under_way()) {
      entry.moved = moved;
      entry.since = now;
      continue;
    }
    const Watchdog::Seconds silence = now - entry.since;
    if (silence <= timeout_) continue;
    if (silence <= kComputingTimeouts * timeout_ && entry.calls.computing()) continue;
    return fail(entry);
  }
}

// Work of other objects queued behind the silent one would wait next, so all objects are released.
void CallWatch::fail(const Entry& entry) {
  failure_ = fmt::format("{} (no progress for {:g} s)", entry.calls.describe(), timeout_.count());
  failed_ = true;  // set before threads that wait for the device continue
  for (const Entry& one : entries_) one.calls.release();
}

}  // namespace annulus
