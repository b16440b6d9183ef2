#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <annulus/ring/simulate.hpp>

#include "simulation/script.hpp"

// The state of a simulation at one moment: the ranks, and the messages on their way.
namespace annulus::ring::simulation {

inline constexpr std::uint32_t kAbsent = std::numeric_limits<std::uint32_t>::max();

/// Work that goes on at a speed that may change.
struct Progress {
  double left = 0;  // seconds at speed 1
  double speed = 0;
  double since = 0;  // the time at which `left` was valid

  void advance(double now) {
    left = std::max(0.0, left - (now - since) * speed);
    since = now;
  }
};

/// The messages of an exchange that come from the rank's own node, or from other nodes, or that go
/// to ranks that are not simulated. They move one after another, except that some transports start
/// all messages between nodes together.
struct Lane {
  Slice list;  // of messages; it may hold messages of other lanes, too
  std::uint32_t next = 0;
  bool busy = false;
  bool begun = false;
  std::vector<std::uint32_t> open;  // messages that start together, but do not move yet
};
enum LaneKind : std::uint8_t { kInside, kAcross, kOutInside, kOutAcross, kLanes };

/// A rank's progress in the exchanges of one group.
struct QueueState {
  std::uint32_t axes = 0;              // identifies the axes of its group
  std::uint32_t done = 0;              // exchanges that have received everything
  bool active = false;                 // the next one has begun
  bool offered = false;                // peers can take the messages that it sends
  bool ready = false;                  // it can receive
  std::uint32_t missing = 0;           // messages not yet received
  std::vector<std::uint32_t> untaken;  // by exchange: messages to send that have not arrived
  std::array<Lane, kLanes> lanes;

  [[nodiscard]] bool released(std::uint32_t exchange) const {
    return exchange < done && untaken[exchange] == 0;
  }
};

struct RankState {
  Script script;
  std::uint32_t node = 0;
  std::uint32_t steps = 0;  // steps that are done
  bool computing = false;
  Progress step;
  double step_begin = 0;
  double last_end = 0;
  std::vector<QueueState> queues;
  std::uint32_t untaken = 0;  // their sum over all queues and exchanges
  int moving = 0;             // messages that are on their way
  int by_kernels = 0;         // messages that multiprocessors move
  double moving_since = 0;
  std::vector<std::uint32_t> followers;  // ranks that wait for a rank that this one stands for
  bool queued = false;                   // in the list of ranks to examine
  bool slowed = false;                   // the speed of its computation must be updated
  RankTimeline timeline;
  std::vector<TraceSpan> spans;

  [[nodiscard]] bool met(Slice needs) const {
    return std::ranges::all_of(script.all(needs), [&](const Need& need) {
      if (need.queue == 0) return steps >= need.count;
      const QueueState& queue = queues[need.queue - 1U];
      return need.released ? queue.released(need.count - 1) : queue.done >= need.count;
    });
  }
  /// The number of the queue for these axes; queues.size() if there is none.
  [[nodiscard]] std::uint32_t queue_of(std::uint32_t axes) const;
  /// True if all steps and exchanges are done.
  [[nodiscard]] bool complete() const;
  /// The text says how many steps and exchanges are done, for errors.
  [[nodiscard]] std::string progress_text() const;
  /// Adds the step that ends now, and the wait before it, to the trace if there is one.
  void record_step(double now);
};

/// A message on its way, or several messages from or to ranks that are not simulated.
struct Flow {
  std::uint32_t sender = kAbsent, sender_queue = 0;
  std::uint32_t sender_exchange = 0;
  std::uint32_t receiver = kAbsent, receiver_queue = 0;
  LaneKind lane = kInside;
  bool across = false;
  std::uint32_t messages = 0;
  double longest = 0;  // seconds of one message at full speed
  double bytes = 0;
  double begin = 0;
  Progress progress;

  /// The flow's weight on its links. It is at most the number of messages, since small ones end
  /// early.
  [[nodiscard]] double weight() const { return longest > 0 ? progress.left / longest : 1; }

  void add(const Message& message) {
    ++messages;
    longest = std::max(longest, message.seconds);
    bytes += message.bytes;
    progress.left += message.seconds;
  }
};

/// Adds a flow that ends now to the traces of its ranks.
void record(const Flow& flow, double now, std::span<RankState> states);

}  // namespace annulus::ring::simulation
