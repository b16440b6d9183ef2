#include <deque>
#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>

namespace annulus {
namespace {

// An event of any host stream.
class HostEventBase : public Event {
 public:
  [[nodiscard]] virtual std::string describe() const = 0;
  /// The mesh ranks that its stream waits for.
  [[nodiscard]] virtual std::vector<int> peers() const = 0;
  /// Increases whenever the event's stream advances.
  [[nodiscard]] virtual std::uint64_t moved() const = 0;
};

std::string describe(const Event& event) {
  const auto* host = dynamic_cast<const HostEventBase*>(&event);
  return host != nullptr ? host->describe() : "waiting for an event of a device";
}

std::vector<int> peers(const Event& event) {
  const auto* host = dynamic_cast<const HostEventBase*>(&event);
  return host != nullptr ? host->peers() : std::vector<int>();
}

std::uint64_t moved(const Event& event) {
  const auto* host = dynamic_cast<const HostEventBase*>(&event);
  return host != nullptr ? host->moved() : 0;
}

}  // namespace

// Entries run in order. `completed` counts finished entries and `submitted` queued ones, so an
// event is just the count that it waits for.
struct HostStream::State {
  struct Entry {
    std::unique_ptr<HostOperation> operation;  // either an operation …
    std::shared_ptr<Event> event;              // … or another stream's event to wait for
    bool started = false;
    std::int64_t begin_ns = 0;
  };

  std::string name;
  Tracer* tracer = nullptr;
  std::deque<Entry> queue;
  std::uint64_t submitted = 0;
  std::uint64_t completed = 0;
  std::uint64_t pieces_before = 0;  // finished pieces of operations that are complete
  bool progressing = false;

  // Increases whenever anything advances.
  [[nodiscard]] std::uint64_t moved() const {
    const bool running = !queue.empty() && queue.front().operation;
    return completed + pieces_before + (running ? queue.front().operation->pieces_finished() : 0);
  }

  void progress() {
    // An event's is_complete() may come back here through a stream that waits for this one.
    if (progressing) return;
    progressing = true;
    struct Reset {
      bool& flag;
      ~Reset() { flag = false; }
    } reset{progressing};
    while (!queue.empty() && advance(queue.front())) {
      if (queue.front().operation) pieces_before += queue.front().operation->pieces_finished();
      queue.pop_front();
      ++completed;
    }
  }

  [[nodiscard]] std::string describe() const {
    if (queue.empty()) return name + ": nothing pending";
    const Entry& front = queue.front();
    return front.operation ? front.operation->describe() : annulus::describe(*front.event);
  }

  [[nodiscard]] std::vector<int> peers() const {
    if (queue.empty()) return {};
    const Entry& front = queue.front();
    return front.operation ? front.operation->peers() : annulus::peers(*front.event);
  }

 private:
  bool advance(Entry& entry) const {
    if (entry.event) return entry.event->is_complete();
    if (!entry.started) {
      entry.started = true;
      if (tracer != nullptr && tracer->enabled()) entry.begin_ns = monotonic_ns();
      entry.operation->start();
    }
    if (!entry.operation->test()) return false;
    if (tracer != nullptr && tracer->enabled()) {
      entry.operation->trace(*tracer, name, entry.begin_ns, monotonic_ns());
    }
    return true;
  }
};

namespace {

template <class State>
class HostEvent final : public HostEventBase {
 public:
  HostEvent(std::shared_ptr<State> state, std::uint64_t count)
      : state_(std::move(state)), count_(count) {}
  [[nodiscard]] bool is_complete() const override {
    if (state_->completed < count_) state_->progress();
    return state_->completed >= count_;
  }
  [[nodiscard]] std::string describe() const override {
    return state_->completed >= count_ ? "nothing pending" : state_->describe();
  }
  [[nodiscard]] std::vector<int> peers() const override {
    return state_->completed >= count_ ? std::vector<int>() : state_->peers();
  }
  [[nodiscard]] std::uint64_t moved() const override { return state_->moved(); }

 private:
  std::shared_ptr<State> state_;
  std::uint64_t count_;
};

}  // namespace

HostStream::HostStream(std::string name, Watchdog watchdog, Tracer* tracer)
    : name_(std::move(name)), watchdog_(std::move(watchdog)), state_(std::make_shared<State>()) {
  state_->name = name_;
  state_->tracer = tracer;
}

HostStream::~HostStream() = default;

std::shared_ptr<Event> HostStream::record() {
  return std::make_shared<HostEvent<State>>(state_, state_->submitted);
}

void HostStream::wait(std::shared_ptr<Event> event) {
  if (event->is_complete()) return;
  if (!state_->queue.empty()) {
    state_->queue.push_back({nullptr, std::move(event), false, 0});
    ++state_->submitted;
    return;
  }
  // The timeout bounds the time without progress, not the time of the whole queue.
  while (!event->is_complete()) {
    const std::uint64_t before = moved(*event);
    watchdog_.wait([&] { return event->is_complete() || moved(*event) != before; },
                   [&] { return describe(*event); }, [&] { return peers(*event); });
  }
}

void HostStream::synchronize(const Waiting& waiting) {
  while (!state_->queue.empty()) {
    const std::uint64_t before = state_->moved();
    watchdog_.wait(
        [&] {
          if (waiting.check) waiting.check();
          state_->progress();
          return state_->queue.empty() || state_->moved() != before;
        },
        [&] { return state_->describe(); }, [&] { return state_->peers(); });
  }
}

void HostStream::progress() {
  // The caller has other work to do. It computes, and other ranks may be waiting for it.
  watchdog_.beat();
  state_->progress();
}

void HostStream::begin_span(TraceLabel label) {
  if (state_->tracer == nullptr || !state_->tracer->enabled()) return;
  open_spans_.push_back({std::move(label), name_, monotonic_ns(), 0});
}

void HostStream::end_span() {
  if (open_spans_.empty()) return;
  open_spans_.back().end_ns = monotonic_ns();
  state_->tracer->record(open_spans_.back());
  open_spans_.pop_back();
}

void HostStream::submit(std::unique_ptr<HostOperation> operation) {
  state_->queue.push_back({std::move(operation), nullptr, false, 0});
  ++state_->submitted;
  state_->progress();
}

HostStream& HostStream::of(Stream& stream) {
  auto* host = dynamic_cast<HostStream*>(&stream);
  if (host == nullptr) {
    throw InternalError("stream '" + stream.name() + "' on " + to_string(stream.place()) +
                        " used as a host stream");
  }
  return *host;
}

}  // namespace annulus
