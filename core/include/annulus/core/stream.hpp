#pragma once

#include <memory>
#include <string>

#include <annulus/core/place.hpp>

namespace annulus {

/// A point in the work of one stream.
class Event {
 public:
  virtual ~Event() = default;
  /// True once everything before the event has finished. Never blocks.
  [[nodiscard]] virtual bool is_complete() const = 0;
};

/// An ordered queue of work. Work submitted to one stream runs in order; two streams are ordered
/// only by events.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// "compute", "communication": the name of the row in a trace.
  [[nodiscard]] virtual const std::string& name() const noexcept = 0;
  [[nodiscard]] virtual Place place() const noexcept = 0;
  /// Marks the end of the work submitted so far.
  [[nodiscard]] virtual std::shared_ptr<Event> record() = 0;
  /// Work submitted from now on starts only after `event`.
  virtual void wait(std::shared_ptr<Event> event) = 0;
  /// Blocks the calling thread until all submitted work has finished; throws TimeoutError.
  virtual void synchronize() = 0;
  /// Moves pending work along without blocking; cheap enough to call from inside a kernel's loop.
  /// A stream that advances by itself does nothing here.
  virtual void progress() = 0;
};

}  // namespace annulus
