#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <annulus/files/file_descriptor.hpp>

namespace annulus::launcher {

/// The terminal that progress may be shown on: this process's standard error, or that of the mpirun
/// that started it and reads its standard error through a pipe. Null if that is a file or a pipe.
[[nodiscard]] files::FileDescriptor progress_terminal();

/// One line on a terminal, written over and over while long work goes on: "verify: 37 of 200
/// problems (18 %), about 2 min left". Nothing is shown in the first moments, nor without a
/// terminal, and nothing is left behind. A thread of its own writes it, so that it stays alive
/// during work that reports nothing; all calls may come from any thread.
class Progress {
 public:
  /// Shows nothing.
  Progress() = default;
  explicit Progress(files::FileDescriptor terminal);
  /// Wipes the line out.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Begins work of `total` units, 0 if that is not known, with an estimate of its own.
  void begin(std::string what, double total = 0);
  /// Nothing is shown until the next begin().
  void end();
  /// Says how many units have been done.
  void advance(double done);
  void set_done(double done);
  /// Runs body() with the line wiped out, for output to the same terminal.
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
