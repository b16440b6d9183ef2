#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <annulus/core/stream.hpp>

namespace annulus::test {

/// A background stream that calls back whenever it is moved along.
class CallbackStream final : public Stream {
 public:
  explicit CallbackStream(std::function<void()> callback) : callback_(std::move(callback)) {}
  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] std::shared_ptr<Event> record() override { return nullptr; }
  void wait(std::shared_ptr<Event> /*event*/) override {}
  void synchronize(const Waiting& /*waiting*/) override {}
  void progress() override { callback_(); }
  void begin_span(TraceLabel /*label*/) override {}
  void end_span() override {}

 private:
  std::string name_ = "background";
  std::function<void()> callback_;
};

}  // namespace annulus::test
