#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include <annulus/core/file_descriptor.hpp>

namespace annulus::launcher {

/// The terminal for progress: this process's standard error, or that of its mpirun, which reads the
/// process's standard error through a pipe. Null if that is a file or a pipe.
[[nodiscard]] files::FileDescriptor progress_terminal();

/// One line on a terminal that is rewritten during long work: "problem 37 of 200, 18 %, about
/// 2 min left". Short work, or work without a terminal, shows nothing, and nothing is left
/// behind. A separate thread writes the line, so that it stays alive during work that does not
/// report; calls may come from any thread.
class Progress {
 public:
  /// Shows nothing.
  Progress() = default;
  explicit Progress(files::FileDescriptor terminal);
  /// Erases the line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Begins work of `total` units (0: unknown) with a new estimate.
  void begin(std::string what, double total = 0);
  /// Names the part of the work that begins now; the estimate goes on.
  void go_on(std::string what);
  /// Shows nothing until the next begin().
  void end();
  /// Sets the number of units that are done.
  void advance(double done);
  void set_done(double done);
  /// Runs body() with the line erased, for output to the same terminal.
  template <class Body>
  void aside(Body&& body) {
    const std::lock_guard lock(mutex_);
    wipe();
    body();
  }

  /// The line after `elapsed` seconds.
  [[nodiscard]] static std::string line(const std::string& what, double done, double total,
                                        double elapsed);

 private:
  using Clock = std::chrono::steady_clock;

  void show();
  void wipe();
  void write(const std::string& text) const;

  files::FileDescriptor terminal_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool end_ = false;
  bool shown_ = false;
  std::string what_;
  double total_ = 0;
  double done_ = 0;
  Clock::time_point begin_;
  std::thread writer_;
};

}  // namespace annulus::launcher
