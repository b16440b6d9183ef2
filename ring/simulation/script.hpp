#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <annulus/core/trace.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/prices.hpp>

/// Plans in the form that a simulation reads. A task has times instead of tensors, and takes so
/// little memory that thousands of ranks with thousands of tasks fit.
namespace annulus::ring::simulation {

/// A condition on a queue of the same rank: its first `count` tasks are done or, if `released` is
/// set, the last of them is released (see Stage).
struct Need {
  std::uint16_t queue = 0;  ///< 0: steps; 1 + i: exchanges of queue i
  bool released = false;
  std::uint32_t count = 0;
};

/// A range of elements of one of the script's lists.
struct Slice {
  std::uint32_t begin = 0;
  std::uint32_t count = 0;
};

/// Computation without a pause. A block that awaits columns is several steps.
struct Step {
  double seconds = 0;
  Slice needs;
  std::uint32_t task = 0;
};

struct Message {
  int peer = 0;         ///< mesh rank
  bool across = false;  ///< to or from another node
  double bytes = 0;
  double seconds = 0;  ///< for which it keeps its links busy at full speed
};

/// An exchange of the plan.
struct ExchangeScript {
  Slice needs;
  Slice takes;  ///< more needs, of receiving only
  Slice sends;
  Slice receives;
  std::uint32_t steps_before = 0;  ///< steps that precede it in the list
  int step = 0;                    ///< the plan's step, the same on all ranks that take part
  std::uint32_t task = 0;
};

/// The exchanges of one group, in order.
struct ExchangeQueue {
  AxisNames axes;
  std::vector<ExchangeScript> exchanges;
};

/// The work of a rank.
struct Script {
  int rank = 0;  ///< in the mesh
  std::vector<Step> steps;
  std::vector<ExchangeQueue> queues;
  std::vector<Need> needs;
  std::vector<Message> messages;
  std::vector<TraceLabel> labels;  ///< by task; empty unless asked for

  [[nodiscard]] std::span<const Need> all(Slice slice) const {
    return std::span(needs).subspan(slice.begin, slice.count);
  }
  [[nodiscard]] std::span<const Message> messages_of(Slice slice) const {
    return std::span(messages).subspan(slice.begin, slice.count);
  }
};

/// `slowness` multiplies the time of all computation.
[[nodiscard]] Script make_script(const RankPlan& plan, const Prices& prices, double slowness,
                                 bool labels);
/// A lower bound of the rank's time. It is the longest of the time of its computation and, for each
/// group, the time of the messages that it receives inside its node, and of those from other nodes.
[[nodiscard]] double least_seconds(const Script& script);

}  // namespace annulus::ring::simulation
