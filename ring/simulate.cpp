#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/ring/simulate.hpp>

#include "cost/cost.hpp"

namespace annulus::ring {
namespace {

// When a task reached each stage, in seconds.
struct Moments {
  double ready = 0;     // of an exchange: it can receive
  double offered = 0;   // of an exchange: peers can take what it sends
  double done = 0;      // computed, or received
  double released = 0;  // of an exchange: peers have taken what it has sent
};

// The stage of an exchange. One that has offered may still wait for its peers.
enum class Phase : std::uint8_t { waiting, offered, received, released };

// The other side of a transfer: a task of a rank of the sample.
struct Other {
  std::size_t rank;
  std::size_t task;
};

struct ExchangeState {
  Phase phase = Phase::waiting;
  std::vector<Other> senders;    // to me
  std::vector<Other> receivers;  // from me
};

struct Queue {
  std::vector<std::size_t> tasks;
  std::size_t next = 0;
  double time = 0;
};

struct RankState {
  std::vector<Moments> moments;  // by task
  std::map<std::size_t, ExchangeState> exchanges;
  std::vector<int> computed_before;  // by task: the last computing task before it; −1 for none
  std::vector<bool> finished;        // by task: its moments are final
  Queue computing;
  std::map<int, Queue> transferring;  // by group
};

class Simulation {
 public:
  Simulation(const Plan& plan, const Prices& prices)
      : plan_(plan),
        prices_(prices),
        traits_(transport_traits(prices.model.transport)),
        states_(plan.ranks.size()),
        timelines_(plan.ranks.size()) {
    for (std::size_t r = 0; r < plan.ranks.size(); ++r) set_up(r);
    match();
  }

  std::vector<RankTimeline> run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (std::size_t r = 0; r < states_.size(); ++r) moved = advance(r) || moved;
    }
    for (std::size_t r = 0; r < states_.size(); ++r) finish(r);
    return std::move(timelines_);
  }

 private:
  void set_up(std::size_t r) {
    const RankPlan& rank = plan_.ranks[r];
    RankState& state = states_[r];
    state.moments.resize(rank.tasks.size());
    state.finished.resize(rank.tasks.size());
    int computed = -1;
    for (std::size_t t = 0; t < rank.tasks.size(); ++t) {
      state.computed_before.push_back(computed);
      if (const auto* exchange = std::get_if<Exchange>(&rank.tasks[t].work)) {
        state.transferring[exchange->group].tasks.push_back(t);
        state.exchanges[t];
      } else {
        state.computing.tasks.push_back(t);
        computed = static_cast<int>(t);
      }
    }
  }

  // Between two ranks of a group, messages match in order.
  void match() {
    std::map<int, std::size_t> index;  // of a mesh rank in the sample
    for (std::size_t r = 0; r < plan_.ranks.size(); ++r) index[plan_.ranks[r].rank] = r;
    using Route = std::tuple<AxisNames, int, int>;  // from one mesh rank to another
    std::map<Route, std::vector<std::size_t>> sent;
    const auto each = [&](std::vector<Transfer> Exchange::*side, const auto& body) {
      for (std::size_t r = 0; r < plan_.ranks.size(); ++r) {
        const RankPlan& rank = plan_.ranks[r];
        for (std::size_t t = 0; t < rank.tasks.size(); ++t) {
          const auto* exchange = std::get_if<Exchange>(&rank.tasks[t].work);
          if (exchange == nullptr) continue;
          const PlanGroup& group = rank.groups[static_cast<std::size_t>(exchange->group)];
          for (const Transfer& transfer : exchange->*side) {
            const int peer = group.ranks[static_cast<std::size_t>(transfer.peer)];
            if (index.contains(peer)) body(r, t, group.axes, rank.rank, peer);
          }
        }
      }
    };
    each(&Exchange::sends,
         [&](std::size_t, std::size_t t, const AxisNames& axes, int from, int to) {
           sent[{axes, from, to}].push_back(t);
         });
    std::map<Route, std::size_t> taken;
    each(&Exchange::receives,
         [&](std::size_t r, std::size_t t, const AxisNames& axes, int to, int from) {
           const Route route{axes, from, to};
           const std::size_t ordinal = taken[route]++;
           const std::vector<std::size_t>& messages = sent[route];
           if (ordinal >= messages.size()) {
             throw InternalError("a plan receives what nobody sends");
           }
           const std::size_t sender = index.at(from);
           states_[r].exchanges[t].senders.push_back({sender, messages[ordinal]});
           states_[sender].exchanges[messages[ordinal]].receivers.push_back({r, t});
         });
  }

  // Everything that this rank can do by now.
  bool advance(std::size_t r) {
    bool moved = false;
    bool again = true;
    while (again) {
      again = compute(r);
      for (auto& [group, queue] : states_[r].transferring) again = transfer(r, queue) || again;
      moved = moved || again;
    }
    return moved;
  }

  // When all of these are met; none if some times are not known yet.
  [[nodiscard]] std::optional<double> when(const RankState& state,
                                           const std::vector<Dependency>& dependencies) const {
    double time = 0;
    for (const Dependency& dependency : dependencies) {
      const auto task = static_cast<std::size_t>(dependency.task);
      const auto exchange = state.exchanges.find(task);
      if (exchange == state.exchanges.end()) {
        if (!state.finished[task]) return std::nullopt;
        time = std::max(time, state.moments[task].done);
        continue;
      }
      const Phase wanted = dependency.stage == Stage::released ? Phase::released : Phase::received;
      if (exchange->second.phase < wanted) return std::nullopt;
      time = std::max(time, dependency.stage == Stage::released ? state.moments[task].released
                                                                : state.moments[task].done);
    }
    return time;
  }

  bool compute(std::size_t r) {
    const RankPlan& rank = plan_.ranks[r];
    RankState& state = states_[r];
    Queue& queue = state.computing;
    bool moved = false;
    while (queue.next < queue.tasks.size()) {
      const std::size_t t = queue.tasks[queue.next];
      const std::optional<double> begin = when(state, rank.tasks[t].after);
      if (!begin) break;
      const double seconds =
          std::visit([&](const auto& work) { return cost(rank, work); }, rank.tasks[t].work);
      const double start = std::max(queue.time, *begin);
      const std::optional<double> waited = waited_inside(rank, state, rank.tasks[t], start);
      if (!waited) break;
      queue.time = start + *waited + seconds;
      timelines_[r].compute += seconds;
      state.moments[t].done = queue.time;
      state.finished[t] = true;
      ++queue.next;
      moved = true;
    }
    return moved;
  }

  // How long a block that begins at `start` waits for its columns; null if that is not known yet.
  [[nodiscard]] std::optional<double> waited_inside(const RankPlan& rank, const RankState& state,
                                                    const Task& task, double start) const {
    const auto* block = std::get_if<Block>(&task.work);
    double waited = 0;
    if (block == nullptr) return waited;
    for (const Arrival& arrival : block->arrivals) {
      const std::optional<double> there = when(state, {{arrival.task, Stage::done}});
      if (!there) return std::nullopt;
      const double needed = seconds_before_waiting(
          rank, *block, block->columns.end() - arrival.columns.end(), prices_);
      waited = std::max(waited, *there - start - needed);
    }
    return waited;
  }

  template <class Work>
  [[nodiscard]] double cost(const RankPlan& rank, const Work& work) const {
    return seconds_of(rank, work, prices_);
  }
  [[nodiscard]] double cost(const RankPlan& /*rank*/, const Exchange& /*work*/) const { return 0; }

  bool transfer(std::size_t r, Queue& queue) {
    const RankPlan& rank = plan_.ranks[r];
    RankState& state = states_[r];
    bool moved = false;
    while (queue.next < queue.tasks.size()) {
      const std::size_t t = queue.tasks[queue.next];
      const auto& exchange = std::get<Exchange>(rank.tasks[t].work);
      ExchangeState& progress = state.exchanges[t];
      Moments& moments = state.moments[t];
      if (progress.phase == Phase::waiting) {
        const std::optional<double> offer = when(state, rank.tasks[t].after);
        const std::optional<double> take = when(state, exchange.receive_after);
        if (!offer || !take) return moved;
        double begin = std::max(queue.time, *offer);
        if (!traits_.ahead) {
          const int before = state.computed_before[t];
          if (before >= 0) {
            if (!state.finished[static_cast<std::size_t>(before)]) return moved;
            begin = std::max(begin, state.moments[static_cast<std::size_t>(before)].done);
          }
        }
        moments.offered = begin;
        moments.ready = std::max(begin, *take);
        progress.phase = Phase::offered;
        moved = true;
      }
      if (progress.phase == Phase::offered && !receive(r, t, exchange, progress)) return moved;
      if (!release(t, state, progress)) return moved;
      queue.time = moments.released;
      ++queue.next;
      moved = true;
    }
    return moved;
  }

  bool receive(std::size_t r, std::size_t t, const Exchange& exchange, ExchangeState& progress) {
    Moments& moments = states_[r].moments[t];
    double start = moments.ready;
    double seconds = seconds_of(exchange.receives, prices_);
    for (const Other& sender : progress.senders) {
      if (states_[sender.rank].exchanges[sender.task].phase < Phase::offered) return false;
      const Moments& theirs = states_[sender.rank].moments[sender.task];
      start = std::max(start, traits_.one_sided ? theirs.offered : theirs.ready);
    }
    if (!traits_.one_sided) {
      for (const Other& receiver : progress.receivers) {
        if (states_[receiver.rank].exchanges[receiver.task].phase < Phase::offered) return false;
        start = std::max(start, states_[receiver.rank].moments[receiver.task].ready);
      }
      seconds = std::max(seconds, seconds_of(exchange.sends, prices_));
    }
    moments.done = start + seconds;
    timelines_[r].transfer += seconds;
    progress.phase = Phase::received;
    return true;
  }

  bool release(std::size_t t, RankState& state, ExchangeState& progress) {
    Moments& moments = state.moments[t];
    moments.released = moments.done;
    if (traits_.one_sided) {
      for (const Other& receiver : progress.receivers) {
        if (states_[receiver.rank].exchanges[receiver.task].phase < Phase::received) return false;
        moments.released =
            std::max(moments.released, states_[receiver.rank].moments[receiver.task].done);
      }
    }
    progress.phase = Phase::released;
    return true;
  }

  void finish(std::size_t r) {
    const RankState& state = states_[r];
    bool complete = state.computing.next == state.computing.tasks.size();
    RankTimeline& timeline = timelines_[r];
    timeline.finish = state.computing.time;
    for (const auto& [group, queue] : state.transferring) {
      complete = complete && queue.next == queue.tasks.size();
      timeline.finish = std::max(timeline.finish, queue.time);
    }
    if (!complete) throw InternalError("the tasks of a plan wait for each other");
    timeline.exposed = timeline.finish - timeline.compute;
  }

  const Plan& plan_;
  const Prices& prices_;
  TransportTraits traits_;
  std::vector<RankState> states_;
  std::vector<RankTimeline> timelines_;
};

}  // namespace

std::vector<RankTimeline> simulate(const Plan& plan, const Prices& prices) {
  return Simulation(plan, prices).run();
}

double predicted_seconds(const Plan& plan, const Prices& prices) {
  double slowest = 0;
  for (const RankTimeline& timeline : simulate(plan, prices)) {
    slowest = std::max(slowest, timeline.finish);
  }
  return slowest;
}

}  // namespace annulus::ring
