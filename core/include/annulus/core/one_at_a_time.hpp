#pragma once

#include <mutex>
#include <string>
#include <thread>

namespace annulus {

/// Detects overlapping calls of two threads to objects that allow one thread at a time. A thread
/// may call from within its own call.
class OneAtATime {
 public:
  class Call {
   public:
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    friend class OneAtATime;
    explicit Call(OneAtATime& owner) noexcept : owner_(owner) {}
    OneAtATime& owner_;
  };

  /// `of` names what the calls belong to: "a Context".
  explicit OneAtATime(std::string of) : of_(std::move(of)) {}

  /// The call lasts as long as the result. Throws LibraryError, naming both calls and their
  /// threads, during a call of another thread, which is not disturbed. `name` must outlive the
  /// call.
  [[nodiscard]] Call begin(const char* name);

 private:
  const std::string of_;
  std::mutex mutex_;
  std::thread::id thread_;  // of the call that lasts
  const char* name_ = nullptr;
  int depth_ = 0;
};

}  // namespace annulus
