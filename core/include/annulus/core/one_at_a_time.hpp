#pragma once

#include <mutex>
#include <string>
#include <thread>

namespace annulus {

/// Detects calls of two threads that overlap where only one thread at a time may call. A thread
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
  /// threads, while a call of another thread lasts, which goes on undisturbed. `name` must outlive
  /// the call.
  [[nodiscard]] Call begin(const char* name);

 private:
  const std::string of_;
  std::mutex mutex_;
  std::thread::id thread_;  // of the call that lasts
  const char* name_ = nullptr;
  int depth_ = 0;
};

}  // namespace annulus
