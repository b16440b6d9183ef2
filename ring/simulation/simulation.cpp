#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>
#include <annulus/ring/simulate.hpp>

#include "simulation/event_queue.hpp"
#include "simulation/links.hpp"
#include "simulation/offers.hpp"
#include "simulation/script.hpp"
#include "simulation/stand_ins.hpp"
#include "simulation/state.hpp"

namespace annulus::ring {
double Stragglers::factor(int rank) const {
  if (most == 0) return 1;
  // SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
  std::uint64_t z = seed + 0x9e3779b97f4a7c15U * (static_cast<std::uint64_t>(rank) + 1);
  z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
  z ^= z >> 31U;
  return 1 + most * static_cast<double>(z >> 11U) * 0x1p-53;
}

namespace simulation {

class Engine {
 public:
  Engine(const Prices& prices, std::string plan, const Stragglers& stragglers)
      : prices_(prices),
        plan_(std::move(plan)),
        traits_(transport_traits(prices.model.transport)),
        inside_(transport_traits(traits_.inside_node())),
        stragglers_(stragglers),
        latencies_{prices.model.messages(false).at_zero(), prices.model.messages(true).at_zero()} {}

  double add(const RankPlan& rank, bool record) {
    return add(make_script(rank, prices_, stragglers_.factor(rank.rank), record));
  }

  void add_alike(std::size_t index, int rank) {
    Script script = states_.at(index).script;
    const double slowness = stragglers_.factor(rank) / stragglers_.factor(script.rank);
    for (Step& step : script.steps) step.seconds *= slowness;
    for (Message& message : script.messages) message.peer += rank - script.rank;
    script.rank = rank;
    static_cast<void>(add(std::move(script)));
  }

  double add(Script script) {
    RankState state;
    state.script = std::move(script);
    state.node = static_cast<std::uint32_t>(prices_.node_of(state.script.rank));
    for (const ExchangeQueue& queue : state.script.queues) {
      QueueState& added = state.queues.emplace_back();
      added.axes =
          axes_.try_emplace(queue.axes, static_cast<std::uint32_t>(axes_.size())).first->second;
      added.untaken.resize(queue.exchanges.size());
    }
    states_.push_back(std::move(state));
    return least_seconds(states_.back().script);
  }

  std::vector<RankTimeline> run(double limit) {
    stand_ins_ = StandIns(states_, prices_);
    links_ = Links(4 * states_.size() + 2 * stand_ins_.nodes());
    for (std::uint32_t r = 0; r < states_.size(); ++r) look_at(r);
    do {
      settle();
      step();
      if (now_ > limit) return {};
    } while (!looked_at_.empty() || !events_.empty() || links_changed_);
    std::vector<RankTimeline> timelines;
    timelines.reserve(states_.size());
    for (RankState& state : states_) {
      if (!state.complete()) {
        throw InternalError(
            fmt::format("the tasks of a plan wait for each other, or for messages that no rank "
                        "sends: {}, in which {}",
                        plan_, state.progress_text()));
      }
      state.timeline.exposed = std::max(0.0, state.timeline.finish - state.timeline.compute);
      timelines.push_back(state.timeline);
    }
    return timelines;
  }

  [[nodiscard]] const std::vector<TraceSpan>& spans(std::size_t index) const {
    return states_.at(index).spans;
  }

 private:
  [[nodiscard]] std::uint32_t present(int rank) const { return stand_ins_.present(rank); }

  // --- Time ---

  // Handles all events of the next moment.
  void step() {
    if (events_.empty()) return;
    // Events whose times differ only by rounding are handled together, because speeds are updated
    // after each moment, and many messages may change their speed.
    constexpr double kSameMoment = 1 + 1e-12;
    now_ = events_.top().time;
    while (!events_.empty() && events_.top().time <= now_ * kSameMoment) {
      const Event event = events_.top();
      events_.pop();
      switch (event.what) {
        case What::step_ends:
          end_step(event.id);
          break;
        case What::flow_starts:
          start_moving(event.id);
          break;
        case What::flow_ends:
          end_flow(event.id);
          break;
      }
    }
  }

  // Advances every rank as far as possible, then updates all speeds.
  void settle() {
    while (!looked_at_.empty()) {
      const std::uint32_t r = looked_at_.back();
      looked_at_.pop_back();
      states_[r].queued = false;
      advance(r);
    }
    links_changed_ = false;
    links_.settle([&](std::uint32_t id, double speed) {
      change_speed(flows_[id].progress, speed, id, What::flow_ends);
    });
    for (const std::uint32_t r : slowed_) {
      RankState& state = states_[r];
      state.slowed = false;
      if (state.computing) change_speed(state.step, speed_of(state), r, What::step_ends);
    }
    slowed_.clear();
  }

  void change_speed(Progress& progress, double speed, std::uint32_t id, What what) {
    if (progress.speed == speed) return;
    progress.advance(now_);
    progress.speed = speed;
    events_.set({now_ + progress.left / speed, id, what});
  }

  void look_at(std::uint32_t r) {
    RankState& state = states_[r];
    if (state.queued) return;
    state.queued = true;
    looked_at_.push_back(r);
  }

  // --- Ranks ---

  void advance(std::uint32_t r) {
    RankState& state = states_[r];
    start_step(r);
    for (std::uint32_t q = 0; q < state.queues.size(); ++q) {
      while (advance_queue(r, q)) start_step(r);
    }
    // A queue may wait for an exchange of a later queue. When that exchange ends, the rank advances
    // again.
  }

  [[nodiscard]] double speed_of(const RankState& state) const {
    return state.by_kernels > 0 ? 1 - prices_.model.transfer_share : 1;
  }

  void start_step(std::uint32_t r) {
    RankState& state = states_[r];
    if (state.computing || state.steps == state.script.steps.size()) return;
    const Step& step = state.script.steps[state.steps];
    if (!state.met(step.needs)) return;
    state.computing = true;
    state.step_begin = now_;
    state.step.left = step.seconds;
    state.step.since = now_;
    state.step.speed = speed_of(state);
    events_.set({now_ + step.seconds / state.step.speed, r, What::step_ends});
  }

  void end_step(std::uint32_t r) {
    RankState& state = states_[r];
    state.record_step(now_);
    state.computing = false;
    state.timeline.compute += now_ - state.step_begin;
    state.timeline.finish = std::max(state.timeline.finish, now_);
    state.last_end = now_;
    ++state.steps;
    look_at(r);
  }

  // --- Exchanges ---

  // True if the queue has moved on to another exchange.
  bool advance_queue(std::uint32_t r, std::uint32_t q) {
    RankState& state = states_[r];
    QueueState& queue = state.queues[q];
    const std::vector<ExchangeScript>& exchanges = state.script.queues[q].exchanges;
    if (queue.done == exchanges.size()) return false;
    const ExchangeScript& exchange = exchanges[queue.done];
    if (!queue.active) {
      if (!state.met(exchange.needs)) return false;
      if (!traits_.ahead && state.steps < exchange.steps_before) return false;
      begin(state, queue, exchange);
    }
    if (!queue.offered && traits_.one_sided) offer(state, queue, exchange);
    if (!queue.ready) {
      if (state.met(exchange.takes)) {
        queue.ready = true;
        if (!traits_.one_sided) offer(state, queue, exchange);
      }
    }
    if (queue.ready) {
      for (std::uint8_t lane = 0; lane < kLanes; ++lane) {
        if (traits_.starts_once && is_across(LaneKind{lane})) {
          start_together(r, q, LaneKind{lane});
        } else {
          start_next(r, q, LaneKind{lane});
        }
      }
    }
    return finish_if_done(r, q);
  }

  void begin(RankState& state, QueueState& queue, const ExchangeScript& exchange) {
    queue.active = true;
    queue.offered = queue.ready = false;
    queue.missing = exchange.receives.count;
    for (const Message& message : state.script.messages_of(exchange.sends)) {
      // A rank that is not simulated takes messages as soon as they are offered.
      if (present(message.peer) == kAbsent && traits_.one_sided) continue;
      ++queue.untaken[queue.done];
      ++state.untaken;
    }
    for (Lane& lane : queue.lanes) {
      lane.next = 0;
      lane.busy = lane.begun = false;
      lane.open.clear();
    }
    queue.lanes[kInside].list = queue.lanes[kAcross].list = exchange.receives;
    if (!traits_.one_sided) {
      queue.lanes[kOutInside].list = queue.lanes[kOutAcross].list = exchange.sends;
    }
  }

  void offer(RankState& state, QueueState& queue, const ExchangeScript& exchange) {
    queue.offered = true;
    for (const std::uint32_t follower : std::exchange(state.followers, {})) look_at(follower);
    const std::uint32_t from = present(state.script.rank);
    for (const Message& message : state.script.messages_of(exchange.sends)) {
      const std::uint32_t to = present(message.peer);
      if (to == kAbsent) continue;
      offers_.add(Offers::route(queue.axes, from, to), queue.done);
      look_at(to);
    }
  }

  [[nodiscard]] static bool is_across(LaneKind lane) {
    return lane == kAcross || lane == kOutAcross;
  }
  [[nodiscard]] static bool is_outgoing(LaneKind lane) { return lane >= kOutInside; }

  // True if the message is one of the lane's.
  [[nodiscard]] bool is_of(LaneKind lane, const Message& message) const {
    return message.across == is_across(lane) &&
           (!is_outgoing(lane) || present(message.peer) == kAbsent);
  }

  // A flow of the lane, without messages so far.
  [[nodiscard]] Flow empty_flow(std::uint32_t r, std::uint32_t q, LaneKind lane) const {
    Flow flow;
    flow.lane = lane;
    flow.across = is_across(lane);
    (is_outgoing(lane) ? flow.sender : flow.receiver) = r;
    (is_outgoing(lane) ? flow.sender_queue : flow.receiver_queue) = q;
    flow.sender_exchange = states_[r].queues[q].done;  // for outgoing ones
    return flow;
  }

  // True if a rank that is not simulated takes part in the current exchange of the simulated rank
  // `r`. It does so once the rank that stands for it has come as far. Until then, `r` is on that
  // rank's list of followers, and will be examined again.
  [[nodiscard]] bool takes_part(int left_out, std::uint32_t r, std::uint32_t q) {
    RankState& stand_in = states_[stand_ins_.stand_in_of(left_out)];
    const QueueState& mine = states_[r].queues[q];
    const std::uint32_t index = stand_in.queue_of(mine.axes);
    if (index == stand_in.queues.size()) return true;
    const QueueState& theirs = stand_in.queues[index];
    const std::vector<ExchangeScript>& exchanges = stand_in.script.queues[index].exchanges;
    if (theirs.done == exchanges.size()) return true;
    const int step = states_[r].script.queues[q].exchanges[mine.done].step;
    const int reached = exchanges[theirs.done].step;
    if (reached > step || (reached == step && theirs.active && theirs.offered)) return true;
    stand_in.followers.push_back(r);
    return false;
  }

  // Adds the message to the flow if the message can move; otherwise returns false.
  [[nodiscard]] bool take(Flow& flow, std::uint32_t r, std::uint32_t q, const Message& message) {
    const std::uint32_t peer = present(message.peer);
    if (peer == kAbsent) {
      if (!takes_part(message.peer, r, q)) return false;
    } else {
      const std::uint32_t axes = states_[r].queues[q].axes;
      const std::optional<std::uint32_t> exchange = offers_.take(Offers::route(axes, peer, r));
      if (!exchange) return false;
      flow.sender = peer;
      flow.sender_queue = states_[peer].queue_of(axes);
      flow.sender_exchange = *exchange;
    }
    flow.add(message);
    return true;
  }

  // Starts the next message of a lane if it can move.
  void start_next(std::uint32_t r, std::uint32_t q, LaneKind kind) {
    RankState& state = states_[r];
    Lane& lane = state.queues[q].lanes[kind];
    const auto messages = state.script.messages_of(lane.list);
    while (!lane.busy && lane.next < messages.size()) {
      const Message& message = messages[lane.next];
      if (is_of(kind, message)) {
        Flow flow = empty_flow(r, q, kind);
        if (!take(flow, r, q, message)) return;
        start(flow, lane);
      }
      ++lane.next;
    }
  }

  // Starts all messages of a lane that can move. Messages of ranks that are not simulated form one
  // flow.
  void start_together(std::uint32_t r, std::uint32_t q, LaneKind kind) {
    RankState& state = states_[r];
    Lane& lane = state.queues[q].lanes[kind];
    const auto messages = state.script.messages_of(lane.list);
    for (; lane.next < messages.size(); ++lane.next) {
      if (is_of(kind, messages[lane.next])) lane.open.push_back(lane.next);
    }
    Flow others = empty_flow(r, q, kind);
    std::erase_if(lane.open, [&](std::uint32_t index) {
      const Message& message = messages[index];
      if (present(message.peer) == kAbsent) return take(others, r, q, message);
      Flow flow = empty_flow(r, q, kind);
      if (!take(flow, r, q, message)) return false;
      start(flow, lane);
      return true;
    });
    if (others.messages > 0) start(others, lane);
  }

  void start(Flow flow, Lane& lane) {
    flow.begin = now_;
    // Inside a node, if the transport starts messages together, only the first message of a lane
    // has a latency.
    const bool started = lane.begun && traits_.starts_once && !flow.across;
    const double latency = started ? 0 : latencies_[flow.across ? 1 : 0];
    lane.busy = lane.begun = true;
    count_moving(flow, 1);
    std::uint32_t id = 0;
    if (free_.empty()) {
      id = static_cast<std::uint32_t>(flows_.size());
      flows_.push_back(flow);
    } else {
      id = free_.back();
      free_.pop_back();
      flows_[id] = flow;
    }
    if (latency > 0) {
      events_.set({now_ + latency, id, What::flow_starts});
    } else {
      start_moving(id);
    }
  }

  void start_moving(std::uint32_t id) {
    Flow& flow = flows_[id];
    flow.progress.since = now_;
    std::array<Links::Demand, Links::kMaximumLinks> demands;
    std::size_t count = 0;
    const std::uint32_t side = flow.across ? 2 : 0;
    const auto nodes = static_cast<std::uint32_t>(4 * states_.size());
    const double node_share = flow.progress.left > 0 ? flow.bytes / flow.progress.left /
                                                           prices_.model.node_bytes_per_second
                                                     : 0;
    const auto add = [&](std::uint32_t r, std::uint32_t direction) {
      if (r == kAbsent) return;
      demands[count++] = {4 * r + side + direction, 1};
      if (!flow.across) return;
      const std::uint32_t node = states_[r].node;
      demands[count++] = {nodes + 2 * node + direction, node_share * stand_ins_.weight(node)};
    };
    add(flow.sender, 0);
    add(flow.receiver, 1);
    links_.enter(id, flow.weight(), demands, count);
    links_changed_ = true;
  }

  void end_flow(std::uint32_t id) {
    links_.leave(id);
    links_changed_ = true;
    const Flow flow = flows_[id];
    free_.push_back(id);
    record(flow, now_, states_);
    count_moving(flow, -1);
    if (flow.receiver != kAbsent) {
      QueueState& queue = states_[flow.receiver].queues[flow.receiver_queue];
      queue.lanes[flow.lane].busy = false;
      queue.missing -= flow.messages;
      look_at(flow.receiver);
    }
    if (flow.sender != kAbsent) {
      RankState& state = states_[flow.sender];
      QueueState& queue = state.queues[flow.sender_queue];
      if (flow.receiver == kAbsent) queue.lanes[flow.lane].busy = false;
      queue.untaken[flow.sender_exchange] -= flow.messages;
      state.untaken -= flow.messages;
      state.timeline.finish = std::max(state.timeline.finish, now_);
      look_at(flow.sender);
    }
  }

  bool finish_if_done(std::uint32_t r, std::uint32_t q) {
    RankState& state = states_[r];
    QueueState& queue = state.queues[q];
    if (!queue.ready || queue.missing > 0) return false;
    // With two-sided transports, both directions end together.
    if (!traits_.one_sided && queue.untaken[queue.done] > 0) return false;
    ++queue.done;
    queue.active = false;
    for (const std::uint32_t follower : std::exchange(state.followers, {})) look_at(follower);
    state.timeline.finish = std::max(state.timeline.finish, now_);
    look_at(r);
    return true;
  }

  void count_moving(const Flow& flow, int change) {
    const bool by_kernels = (flow.across ? traits_ : inside_).on_multiprocessors;
    if (flow.receiver != kAbsent) count_moving(flow.receiver, change, by_kernels);
    if (flow.sender != kAbsent && !traits_.one_sided) {
      count_moving(flow.sender, change, by_kernels);
    }
  }

  void count_moving(std::uint32_t r, int change, bool by_kernels) {
    RankState& state = states_[r];
    if (state.moving == 0) state.moving_since = now_;
    state.moving += change;
    if (state.moving == 0) state.timeline.transfer += now_ - state.moving_since;
    if (!by_kernels) return;
    state.by_kernels += change;
    if (state.slowed) return;
    state.slowed = true;
    slowed_.push_back(r);
  }

  const Prices& prices_;
  std::string plan_;
  TransportTraits traits_;
  TransportTraits inside_;  // of the transport inside a node
  Stragglers stragglers_;
  std::array<double, 2> latencies_;  // until a message moves: inside a node, between nodes
  std::vector<RankState> states_;
  std::map<AxisNames, std::uint32_t> axes_;
  StandIns stand_ins_;
  Links links_;
  bool links_changed_ = false;
  std::vector<Flow> flows_;
  std::vector<std::uint32_t> free_;
  Offers offers_;
  EventQueue events_;
  std::vector<std::uint32_t> looked_at_;
  std::vector<std::uint32_t> slowed_;
  double now_ = 0;
};

}  // namespace simulation

class Simulation::Impl : public simulation::Engine {
  using Engine::Engine;
};

Simulation::Simulation(const Prices& prices, std::string plan, const Stragglers& stragglers)
    : impl_(std::make_unique<Impl>(prices, std::move(plan), stragglers)) {}

Simulation::~Simulation() = default;

double Simulation::add(const RankPlan& rank, bool record) {
  return impl_->add(rank, record);
}

void Simulation::add_alike(std::size_t index, int rank) {
  impl_->add_alike(index, rank);
}

std::vector<RankTimeline> Simulation::run(double limit) {
  return impl_->run(limit);
}

const std::vector<TraceSpan>& Simulation::spans(std::size_t index) const {
  return impl_->spans(index);
}

std::vector<RankTimeline> simulate(const Plan& plan, const Prices& prices) {
  Simulation simulation(prices,
                        variant_text({plan.schedule, plan.ulysses_degree, plan.inner_size}));
  for (const RankPlan& rank : plan.ranks) simulation.add(rank);
  return simulation.run();
}

double least_seconds(const RankPlan& rank, const Prices& prices) {
  return least_seconds(simulation::make_script(rank, prices, 1, false));
}

double predicted_seconds(const Plan& plan, const Prices& prices) {
  double slowest = 0;
  for (const RankTimeline& timeline : simulate(plan, prices)) {
    slowest = std::max(slowest, timeline.finish);
  }
  return slowest;
}

}  // namespace annulus::ring
