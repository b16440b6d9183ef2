#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

/// The kind of work that a span shows. Time of a call that is neither kernel nor transfer counts
/// as bookkeeping.
enum class TraceCategory : std::uint8_t {
  call,      ///< one whole sharded attention call
  kernel,    ///< a local attention kernel
  merge,     ///< merging partial results
  transfer,  ///< messages on their way; see TraceSpan
  wait,      ///< waiting for a transfer with nothing to compute
  plan,
  file,
  other
};

[[nodiscard]] std::string_view name_of(TraceCategory category) noexcept;

/// One message of a transfer, as one of its two ranks sees it.
struct TraceMessage {
  int peer = 0;  ///< mesh rank on the other side
  std::int64_t bytes = 0;
  bool incoming = false;

  bool operator==(const TraceMessage&) const = default;
};

/// The name and kind of a span.
struct TraceLabel {
  TraceCategory category = TraceCategory::other;
  std::string name;
  int step = -1;  ///< negative: does not apply
  /// The messages of a transfer: arrows lead from the sender's span to the receiver's.
  std::vector<TraceMessage> messages = {};
};

/// One span on one stream of one rank. Times are nanoseconds of the monotonic clock.
///
/// A rank sees a message from its posting until it notices the completion. Only the spans of both
/// sides show when the other side was ready; see begin_when_moving().
struct TraceSpan {
  TraceLabel label;
  std::string stream;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t waited_ns = 0;  ///< time before the begin: posted, but the other side was not ready
};

class TraceSink {
 public:
  virtual ~TraceSink() = default;
  virtual void record(const TraceSpan& span) = 0;
};

/// Nanoseconds of the monotonic clock, the same for every process of a node.
[[nodiscard]] std::int64_t monotonic_ns() noexcept;

/// Passes spans to its sinks. Without a sink, tracing costs one comparison.
class Tracer {
 public:
  /// `sink` must outlive the tracer.
  void add_sink(TraceSink& sink) { sinks_.push_back(&sink); }
  [[nodiscard]] bool enabled() const noexcept { return !paused_ && !sinks_.empty(); }
  /// While paused, spans are neither measured nor recorded. Must not be called inside a span.
  void pause(bool paused) noexcept { paused_ = paused; }
  void record(const TraceSpan& span) {
    for (TraceSink* sink : sinks_) sink->record(span);
  }

 private:
  std::vector<TraceSink*> sinks_;
  bool paused_ = false;
};

/// Records the time from its construction to its destruction. A null tracer is allowed.
class TraceScope {
 public:
  TraceScope(Tracer* tracer, std::string_view stream, TraceLabel label);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Tracer* tracer_;  // null without a sink
  TraceSpan span_;
};

/// A sink that keeps the spans in memory.
class TraceCollector final : public TraceSink {
 public:
  void record(const TraceSpan& span) override { spans_.push_back(span); }
  [[nodiscard]] const std::vector<TraceSpan>& spans() const noexcept { return spans_; }
  void clear() { spans_.clear(); }

 private:
  std::vector<TraceSpan> spans_;
};

/// The time of one rank's traced calls, in nanoseconds.
struct TraceSummary {
  std::int64_t call = 0;
  std::int64_t kernel = 0;
  std::int64_t merge = 0;
  std::int64_t wait = 0;                   ///< exposed transfer time
  std::int64_t transfer = 0;               ///< message time, hidden or not
  std::int64_t transfer_under_kernel = 0;  ///< message time that passed while a kernel ran
  /// call − kernel − wait: time that was neither kernel nor transfer.
  [[nodiscard]] std::int64_t bookkeeping() const { return call - kernel - wait; }
};

[[nodiscard]] TraceSummary summarize(const std::vector<TraceSpan>& spans);

}  // namespace annulus
