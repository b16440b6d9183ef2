#include "mpi/deadline.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace annulus {

Deadline::Deadline(Watchdog::Seconds most, std::string text, LastWord last_word, int exit_code)
    : thread_([this, most = std::min(most, Watchdog::kLongest), text = std::move(text),
               last_word = std::move(last_word), exit_code] {
        std::unique_lock lock(mutex_);
        if (end_.wait_for(lock, most, [this] { return ended_; })) return;
        if (last_word) last_word(text);
        std::_Exit(exit_code);
      }) {}

Deadline::~Deadline() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  end_.notify_one();
  thread_.join();
}

}  // namespace annulus
