#include "launcher/report/interruption.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <string>
#include <unistd.h>
#include <utility>

#include <annulus/core/temporary_file.hpp>

namespace annulus::launcher {
namespace {

struct HandledSignal {
  int number;
  std::string_view name;
};
constexpr std::array kSignals{HandledSignal{SIGINT, "SIGINT"}, HandledSignal{SIGTERM, "SIGTERM"},
                              HandledSignal{SIGHUP, "SIGHUP"}};

/// A short text for the signal handler, which must neither allocate nor lock. The next text is
/// written beside the current one, so that the handler always finds a complete one.
class ShownText {
 public:
  void set(std::string_view text) noexcept {
    const std::size_t next = 1 - current_;
    Copy& copy = copies_[next];
    copy.size = std::min(text.size(), copy.text.size());
    std::memcpy(copy.text.data(), text.data(), copy.size);
    current_ = next;
  }
  [[nodiscard]] std::string_view get() const noexcept {
    const Copy& copy = copies_[current_];
    return {copy.text.data(), copy.size};
  }

 private:
  struct Copy {
    std::array<char, 200> text{};
    std::size_t size = 0;
  };
  std::array<Copy, 2> copies_;
  std::atomic<std::size_t> current_ = 0;
  static_assert(std::atomic<std::size_t>::is_always_lock_free);
};
ShownText shown_step;
ShownText shown_rows;
std::atomic<bool> speaking = false;
std::atomic<bool> interrupted = false;
static_assert(std::atomic<bool>::is_always_lock_free);

/// The same for a text of any length.
std::array<std::string, 2> last_words;
std::atomic<const std::string*> last_word = nullptr;
static_assert(std::atomic<const std::string*>::is_always_lock_free);

// Pipes take long texts in pieces.
void write_all(std::string_view text) noexcept {
  while (!text.empty()) {
    const ::ssize_t count = ::write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

/// A line that grows without allocating.
class Line {
 public:
  void add(std::string_view text) noexcept {
    const std::size_t size = std::min(text.size(), text_.size() - size_);
    std::memcpy(text_.data() + size_, text.data(), size);
    size_ += size;
  }
  void print() const noexcept { static_cast<void>(::write(STDERR_FILENO, text_.data(), size_)); }

 private:
  std::array<char, 400> text_{};
  std::size_t size_ = 0;
};

extern "C" void interrupt(int signal) {
  // However many signals a launcher sends, the first one ends the process, once all is said.
  if (interrupted.exchange(true)) return;
  files::remove_temporary_files();
  if (const std::string* const text = last_word.load(); text != nullptr) write_all(*text);
  if (speaking) {
    Line line;
    line.add("annulus: interrupted by ");
    for (const HandledSignal& handled : kSignals) {
      if (handled.number == signal) line.add(handled.name);
    }
    if (!shown_step.get().empty()) line.add(" while ");
    line.add(shown_step.get());
    const std::string_view rows = shown_rows.get();
    line.add(rows.empty() ? "; no unfinished file is left" : "; finished rows are ");
    line.add(rows);
    line.add("\n");
    line.print();
  }
  ::raise(signal);  // SA_RESETHAND has restored the default action
}

}  // namespace

void handle_interruptions(bool speaks) {
  speaking = speaks;
  for (const HandledSignal& handled : kSignals) {
    struct sigaction former {};
    if (::sigaction(handled.number, nullptr, &former) != 0 || former.sa_handler != SIG_DFL) {
      continue;
    }
    struct sigaction action {};
    action.sa_handler = interrupt;
    action.sa_flags = SA_RESETHAND;
    sigemptyset(&action.sa_mask);
    ::sigaction(handled.number, &action, nullptr);
  }
}

void begin_step(std::string_view what) noexcept {
  shown_step.set(what);
}

std::string_view current_step() noexcept {
  return shown_step.get();
}

void print_when_interrupted(std::string text) {
  if (interrupted) return;  // a handler on another thread reads the texts
  std::string& next = last_word == last_words.data() ? last_words[1] : last_words[0];
  next = std::move(text);
  last_word = next.empty() ? nullptr : &next;
}

void rows_are_kept(std::string_view how) noexcept {
  shown_rows.set(how);
}

void end_steps() noexcept {
  speaking = false;
}

}  // namespace annulus::launcher
