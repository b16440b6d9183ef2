#include <functional>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/one_at_a_time.hpp>

namespace annulus {
namespace {

std::size_t number_of(std::thread::id thread) {
  return std::hash<std::thread::id>()(thread);
}

}  // namespace

OneAtATime::Call OneAtATime::begin(const char* name) {
  const std::thread::id mine = std::this_thread::get_id();
  const std::lock_guard lock(mutex_);
  if (depth_ > 0 && thread_ != mine) {
    throw LibraryError(
        fmt::format("{} on thread {:x} during {} on thread {:x}: one thread at a time may call {}",
                    name, number_of(mine), name_, number_of(thread_), of_));
  }
  if (depth_++ == 0) {
    thread_ = mine;
    name_ = name;
  }
  return Call(*this);
}

OneAtATime::Call::~Call() {
  const std::lock_guard lock(owner_.mutex_);
  --owner_.depth_;
}

}  // namespace annulus
