#include "launcher/report/progress.hpp"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fcntl.h>
#include <fstream>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

namespace annulus::launcher {
namespace {

// Work that takes less shows no line.
constexpr std::chrono::milliseconds kPatience{700};
constexpr std::chrono::milliseconds kBetweenLines{200};
// An estimate from less time would be worthless.
constexpr double kLeastElapsed = 2;  // seconds
constexpr double kLeastPart = 0.01;

bool is_pipe(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 && S_ISFIFO(status.st_mode);
}

bool is_mpi_launcher(::pid_t process) {
  std::ifstream file(fmt::format("/proc/{}/comm", process));
  std::string name;
  std::getline(file, name);
  constexpr std::string_view kLaunchers[] = {"mpirun", "mpiexec", "orterun", "prterun"};
  return std::find(std::begin(kLaunchers), std::end(kLaunchers), name) != std::end(kLaunchers);
}

std::string duration(double seconds) {
  if (seconds < 90) return fmt::format("{:.0f} s", std::max(1.0, std::ceil(seconds)));
  if (seconds < 90 * 60) return fmt::format("{:.0f} min", seconds / 60);
  return fmt::format("{:.1f} h", seconds / 3600);
}

}  // namespace

files::FileDescriptor progress_terminal() {
  if (::isatty(STDERR_FILENO) != 0) {
    return files::FileDescriptor(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
  }
  if (!is_pipe(STDERR_FILENO) || !is_mpi_launcher(::getppid())) return {};
  files::FileDescriptor terminal(
      ::open(fmt::format("/proc/{}/fd/2", ::getppid()).c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC));
  if (!terminal || ::isatty(terminal.get()) == 0) return {};
  return terminal;
}

Progress::Progress(files::FileDescriptor terminal) : terminal_(std::move(terminal)) {
  if (!terminal_) return;
  begin_ = Clock::now();
  writer_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, kBetweenLines, [this] { return end_; })) show();
  });
}

Progress::~Progress() {
  if (!writer_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
    wipe();
  }
  ended_.notify_all();
  writer_.join();
}

void Progress::begin(std::string what, double total) {
  const std::lock_guard lock(mutex_);
  what_ = std::move(what);
  total_ = total;
  done_ = 0;
  begin_ = Clock::now();
}

void Progress::go_on(std::string what) {
  const std::lock_guard lock(mutex_);
  what_ = std::move(what);
}

void Progress::end() {
  const std::lock_guard lock(mutex_);
  what_.clear();
  wipe();
}

void Progress::advance(double done) {
  const std::lock_guard lock(mutex_);
  done_ += done;
}

void Progress::set_done(double done) {
  const std::lock_guard lock(mutex_);
  done_ = done;
}

void Progress::show() {
  const auto elapsed = Clock::now() - begin_;
  if (what_.empty() || (!shown_ && elapsed < kPatience)) return;
  // Leaves the cursor at the margin, where other output begins; "\33[K" erases the old text.
  write("\r" + line(what_, done_, total_, std::chrono::duration<double>(elapsed).count()) +
        "\33[K\r");
  shown_ = true;
}

void Progress::wipe() {
  if (shown_) write("\r\33[K");
  shown_ = false;
}

// Failures are ignored, since the terminal may be gone. A terminal may also stop background jobs
// that write to it, as mpirun's ranks may be; with the signal blocked, they can write.
void Progress::write(const std::string& text) const {
  sigset_t stopping;
  sigset_t before;
  sigemptyset(&stopping);
  sigaddset(&stopping, SIGTTOU);
  ::pthread_sigmask(SIG_BLOCK, &stopping, &before);
  static_cast<void>(::write(terminal_.get(), text.data(), text.size()) == 0);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::string Progress::line(const std::string& what, double done, double total, double elapsed) {
  if (total <= 0) return fmt::format("annulus: {}, {} so far", what, duration(elapsed));
  const double part = std::clamp(done / total, 0.0, 1.0);
  std::string text = fmt::format("annulus: {}, {:.0f} %", what, std::floor(part * 100));
  if (part < kLeastPart || elapsed < kLeastElapsed) return text;
  if (part < 1) text += fmt::format(", about {} left", duration(elapsed / part * (1 - part)));
  return text;
}

}  // namespace annulus::launcher
