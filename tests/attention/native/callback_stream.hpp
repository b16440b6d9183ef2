#pragma once

#include <functional>
#include <utility>

#include "tests/support/idle_stream.hpp"

namespace annulus::test {

/// A background stream that calls back whenever it is moved along.
class CallbackStream final : public IdleStream {
 public:
  explicit CallbackStream(std::function<void()> callback)
      : IdleStream(Place::host(), "background"), callback_(std::move(callback)) {}
  void progress() override { callback_(); }

 private:
  std::function<void()> callback_;
};

}  // namespace annulus::test
