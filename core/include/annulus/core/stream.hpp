#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <annulus/core/place.hpp>
#include <annulus/core/trace.hpp>

namespace annulus {

/// A point in the work of one stream.
class Event {
 public:
  virtual ~Event() = default;
  /// True once everything before the event has finished. Never blocks.
  [[nodiscard]] virtual bool is_complete() const = 0;
};

/// Callbacks of a thread that waits for a stream. Each may be empty.
struct Waiting {
  std::function<void()> check;            ///< called now and then; throws to give up
  std::function<std::string()> describe;  ///< what is waited for, if the stream cannot say
  std::function<bool()> computing;        ///< no peer is waited for: see kComputingTimeouts
  std::function<std::uint64_t()> moved;   ///< changes with progress; marked(), if empty
};

/// While a device computes, moved() may stay the same for this many timeouts. After that, its
/// kernel counts as hung.
inline constexpr int kComputingTimeouts = 20;

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
  void synchronize() { synchronize({}); }
  virtual void synchronize(const Waiting& waiting) = 0;
  /// Advances pending work without blocking. Cheap enough to be called from a kernel's loop. Does
  /// nothing on a stream that advances by itself.
  virtual void progress() = 0;

  /// Hands the collected operations to the device, if the stream collects any. Call it before the
  /// calling thread may block while another rank needs the submitted work. record(), wait() and
  /// synchronize() flush too.
  virtual void flush() {}
  /// Forgets collected operations that were not handed over, after a call has failed half-way.
  virtual void discard() noexcept {}

  /// True while submitted work is captured into a graph instead of executed.
  [[nodiscard]] virtual bool is_captured() const { return false; }

  /// marked() returns `value` once all work submitted so far has finished. It shows how far a
  /// device has come without a call to it. Does nothing on a stream that knows its progress anyway.
  virtual void mark(std::uint32_t /*value*/) {}
  [[nodiscard]] virtual std::uint32_t marked() const { return 0; }

  /// Work submitted between these two calls is one span of the trace, if the stream has a tracer.
  /// Spans nest.
  virtual void begin_span(TraceLabel label) = 0;
  virtual void end_span() = 0;
};

/// A span of the stream's trace, from its construction to its destruction.
class StreamSpan {
 public:
  StreamSpan(Stream& stream, TraceLabel label) : stream_(stream) {
    stream_.begin_span(std::move(label));
  }
  ~StreamSpan() { stream_.end_span(); }
  StreamSpan(const StreamSpan&) = delete;
  StreamSpan& operator=(const StreamSpan&) = delete;

 private:
  Stream& stream_;
};

/// Work that was recorded instead of executed, and can be submitted any number of times.
class Recording {
 public:
  virtual ~Recording() = default;
  /// Submits the recorded work to `stream`.
  virtual void submit(Stream& stream) = 0;
};

}  // namespace annulus
