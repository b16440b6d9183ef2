#pragma once

#include <memory>
#include <string>
#include <utility>

#include <annulus/core/stream.hpp>

namespace annulus::test {

/// A stream without work.
class IdleStream : public Stream {
 public:
  explicit IdleStream(Place place, std::string name = "idle")
      : place_(place), name_(std::move(name)) {}
  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] Place place() const noexcept override { return place_; }
  [[nodiscard]] std::shared_ptr<Event> record() override { return nullptr; }
  void wait(std::shared_ptr<Event> /*event*/) override {}
  void synchronize(const Waiting& /*waiting*/) override {}
  void progress() override {}
  void begin_span(TraceLabel /*label*/) override {}
  void end_span() override {}

 private:
  Place place_;
  std::string name_;
};

}  // namespace annulus::test
