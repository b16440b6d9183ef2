#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <annulus/core/stream.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

/// Work on a host stream that takes time without using the CPU: a transfer between ranks.
class HostOperation {
 public:
  virtual ~HostOperation() = default;
  /// Called once, after all earlier work of the stream has finished.
  virtual void start() = 0;
  /// Advances the work. Returns true once it has finished. Never blocks.
  virtual bool test() = 0;
  /// The number of finished pieces, which shows the progress of a long transfer.
  [[nodiscard]] virtual std::uint64_t pieces_finished() const { return 0; }
  /// "step 2: waiting for 1.5 MiB of key/value from rank 3": for a timeout.
  [[nodiscard]] virtual std::string describe() const = 0;
  /// The mesh ranks that it still waits for.
  [[nodiscard]] virtual std::vector<int> peers() const { return {}; }
  /// Name and messages for the trace.
  [[nodiscard]] virtual TraceLabel label() const = 0;
  /// Records the finished operation in the trace: one span from its start to its end, unless it
  /// knows its parts.
  virtual void trace(Tracer& tracer, const std::string& stream, std::int64_t begin_ns,
                     std::int64_t end_ns) const {
    tracer.record({label(), stream, begin_ns, end_ns});
  }
};

/// A stream on the CPU. Computation runs at once in the calling thread, so an event recorded after
/// it is complete. Operations are queued: each starts when the previous one has finished, and
/// advances only inside progress(), wait() or synchronize() of this stream or of one that waits for
/// it. Not thread-safe: one thread drives all host streams of a rank.
class HostStream final : public Stream {
 public:
  HostStream(std::string name, Watchdog watchdog, Tracer* tracer);
  ~HostStream() override;

  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] std::shared_ptr<Event> record() override;
  /// Queues the wait if this stream has queued operations. Otherwise blocks, and advances the other
  /// stream's work meanwhile.
  void wait(std::shared_ptr<Event> event) override;
  using Stream::synchronize;
  void synchronize(const Waiting& waiting) override;
  void progress() override;
  void begin_span(TraceLabel label) override;
  void end_span() override;

  /// Queues an operation, and starts it at once if the queue was empty.
  void submit(std::unique_ptr<HostOperation> operation);

  /// The host stream behind `stream`; throws InternalError for a device stream.
  static HostStream& of(Stream& stream);

 private:
  struct State;
  std::string name_;
  Watchdog watchdog_;
  std::shared_ptr<State> state_;  // shared with events, which may outlive the stream
  std::vector<TraceSpan> open_spans_;
};

}  // namespace annulus
