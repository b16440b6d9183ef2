#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

/// What the time of a span was spent on. Time of a call that is neither kernel nor transfer counts
/// as bookkeeping.
enum class TraceCategory : std::uint8_t {
  call,      ///< one whole sharded attention call
  kernel,    ///< a local attention kernel
  merge,     ///< merging partial results
  transfer,  ///< a message on its way, from post to completion
  wait,      ///< waiting for a transfer with nothing to compute
  plan,
  file,
  other
};

[[nodiscard]] std::string_view name_of(TraceCategory category) noexcept;

/// What a span is about. A negative number means "does not apply" and is not shown.
struct TraceLabel {
  TraceCategory category = TraceCategory::other;
  std::string name;
  int step = -1;
  int peer = -1;
  std::int64_t bytes = -1;
};

/// One span on one stream of one rank. Times are nanoseconds of the monotonic clock.
struct TraceSpan {
  TraceLabel label;
  std::string stream;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
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

/// Where the time of the traced calls of one rank went, in nanoseconds.
struct TraceSummary {
  std::int64_t call = 0;
  std::int64_t kernel = 0;
  std::int64_t merge = 0;
  std::int64_t wait = 0;                   ///< exposed transfer time
  std::int64_t transfer = 0;               ///< message time, hidden or not
  std::int64_t transfer_under_kernel = 0;  ///< message time that passed while a kernel ran
  /// call − kernel − wait: what was neither kernel nor transfer.
  [[nodiscard]] std::int64_t bookkeeping() const { return call - kernel - wait; }
};

[[nodiscard]] TraceSummary summarize(const std::vector<TraceSpan>& spans);

/// One row per category and name: count, total, mean.
void write_text_summary(std::ostream& out, const std::vector<TraceSpan>& spans);

/// Chrome trace-event JSON of one rank (pid = rank, tid = stream) without the enclosing brackets,
/// so that the ranks' pieces can be joined with commas; empty when there are no spans. `epoch_ns`
/// is subtracted from every time.
[[nodiscard]] std::string chrome_trace_events(const std::vector<TraceSpan>& spans, int rank,
                                              std::int64_t epoch_ns);

}  // namespace annulus
