#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <annulus/core/watchdog.hpp>

namespace annulus {

/// Ends this process if a call that cannot be interrupted does not return in time. Construct it
/// before the call, destroy it after. The launcher then ends the rest of the job.
class Deadline {
 public:
  using LastWord = std::function<void(const std::string& text)>;

  /// After `most`, or Watchdog::kLongest, passes `text` to `last_word` (which may be empty) and
  /// exits with `exit_code`.
  Deadline(Watchdog::Seconds most, std::string text, LastWord last_word, int exit_code);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace annulus
