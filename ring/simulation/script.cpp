#include "simulation/script.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <variant>

#include "cost/cost.hpp"
#include "task_labels.hpp"

namespace annulus::ring::simulation {
namespace {

std::uint32_t index_of(std::size_t index) {
  return static_cast<std::uint32_t>(index);
}

class Writer {
 public:
  Writer(const RankPlan& plan, const Prices& prices, double slowness, bool labels)
      : plan_(plan), prices_(prices), slowness_(slowness), ends_(plan.tasks.size()) {
    script_.rank = plan.rank;
    if (labels) script_.labels.resize(plan.tasks.size());
    number_exchanges();
  }

  [[nodiscard]] Script write() {
    // The ends of tasks are numbered first, since a task may wait for one that comes later.
    for (std::size_t t = 0; t < plan_.tasks.size(); ++t) {
      if (const auto* block = std::get_if<Block>(&plan_.tasks[t].work)) {
        steps_ += index_of(block->arrivals.size());
      }
      if (std::holds_alternative<Exchange>(plan_.tasks[t].work)) continue;
      ends_[t] = {0, false, ++steps_};
    }
    for (task_ = 0; task_ < plan_.tasks.size(); ++task_) {
      if (!script_.labels.empty()) script_.labels[task_] = trace_label(plan_, plan_.tasks[task_]);
      std::visit([&](const auto& work) { add(work); }, plan_.tasks[task_].work);
    }
    return std::move(script_);
  }

 private:
  void number_exchanges() {
    for (std::size_t t = 0; t < plan_.tasks.size(); ++t) {
      const auto* exchange = std::get_if<Exchange>(&plan_.tasks[t].work);
      if (exchange == nullptr) continue;
      const auto [entry, fresh] = queues_.try_emplace(exchange->group, script_.queues.size());
      if (fresh) {
        script_.queues.push_back(
            {plan_.groups[static_cast<std::size_t>(exchange->group)].axes, {}});
        counts_.push_back(0);
      }
      ends_[t] = {static_cast<std::uint16_t>(1 + entry->second), false, ++counts_[entry->second]};
    }
  }

  [[nodiscard]] Slice needs_of(const std::vector<Dependency>& dependencies) {
    const Slice slice{index_of(script_.needs.size()), index_of(dependencies.size())};
    for (const Dependency& dependency : dependencies) {
      Need need = ends_[static_cast<std::size_t>(dependency.task)];
      need.released = dependency.stage == Stage::released;
      script_.needs.push_back(need);
    }
    return slice;
  }

  [[nodiscard]] const std::vector<Dependency>& after() const { return plan_.tasks[task_].after; }

  void add_step(double seconds, Slice needs) {
    script_.steps.push_back({seconds * slowness_, needs, index_of(task_)});
  }

  void add(const Copy& copy) {
    const bool launched =
        task_ > 0 && after().empty() && std::holds_alternative<Copy>(plan_.tasks[task_ - 1].work);
    const double launch = launched ? 0 : prices_.model.launch_seconds;
    add_step(launch + seconds_of(plan_, copy, prices_), needs_of(after()));
  }

  template <class Work>
  void add(const Work& work) {
    add_step(seconds_of(plan_, work, prices_), needs_of(after()));
  }

  // A block begins at once and pauses where it needs columns that have not arrived.
  void add(const Block& block) {
    Slice needs = needs_of(after());
    double done = 0;
    for (const Arrival& arrival : block.arrivals) {
      const double until =
          std::max(done, seconds_before_waiting(
                             plan_, block, block.columns.end() - arrival.columns.end(), prices_));
      add_step(until - done, needs);
      done = until;
      needs = needs_of({{arrival.task, Stage::done}});
    }
    add_step(std::max(0.0, seconds_of(plan_, block, prices_) - done), needs);
  }

  [[nodiscard]] Slice messages_of(const PlanGroup& group, const std::vector<Transfer>& transfers) {
    const Slice slice{index_of(script_.messages.size()), index_of(transfers.size())};
    for (const Transfer& transfer : transfers) {
      const int peer = group.ranks[static_cast<std::size_t>(transfer.peer)];
      const bool across = prices_.node_of(peer) != prices_.node_of(plan_.rank);
      script_.messages.push_back({peer, across, static_cast<double>(transfer.bytes), 0});
    }
    for (const bool across : {false, true}) price(slice, across);
    return slice;
  }

  // Messages inside a node follow each other, and so do messages between nodes.
  void price(Slice slice, bool across) {
    bytes_.clear();
    for (const Message& message : script_.messages_of(slice)) {
      if (message.across == across) bytes_.push_back(message.bytes);
    }
    if (bytes_.empty()) return;
    const MessageCosts costs = costs_of_messages(bytes_, across, prices_.model);
    auto seconds = costs.seconds.begin();
    for (std::uint32_t i = slice.begin; i < slice.begin + slice.count; ++i) {
      Message& message = script_.messages[i];
      if (message.across == across) message.seconds = *seconds++;
    }
  }

  void add(const Exchange& exchange) {
    const PlanGroup& group = plan_.groups[static_cast<std::size_t>(exchange.group)];
    ExchangeScript script;
    script.needs = needs_of(after());
    script.takes = needs_of(exchange.receive_after);
    script.sends = messages_of(group, exchange.sends);
    script.receives = messages_of(group, exchange.receives);
    script.steps_before = index_of(script_.steps.size());
    script.task = index_of(task_);
    script.step = plan_.tasks[task_].step;
    script_.queues[queues_.at(exchange.group)].exchanges.push_back(script);
  }

  const RankPlan& plan_;
  const Prices& prices_;
  double slowness_;
  Script script_;
  std::size_t task_ = 0;  // being written
  std::uint32_t steps_ = 0;
  std::vector<Need> ends_;             // by task: when it is done
  std::map<int, std::size_t> queues_;  // by group
  std::vector<std::uint32_t> counts_;  // exchanges by queue
  std::vector<double> bytes_;          // of messages
};

}  // namespace

Script make_script(const RankPlan& plan, const Prices& prices, double slowness, bool labels) {
  return Writer(plan, prices, slowness, labels).write();
}

double least_seconds(const Script& script) {
  double least = 0;
  for (const Step& step : script.steps) least += step.seconds;
  for (const ExchangeQueue& queue : script.queues) {
    std::array<double, 2> received{};  // from its own node, from other nodes
    for (const ExchangeScript& exchange : queue.exchanges) {
      for (const Message& message : script.messages_of(exchange.receives)) {
        received[message.across ? 1 : 0] += message.seconds;
      }
    }
    least = std::max({least, received[0], received[1]});
  }
  return least;
}

}  // namespace annulus::ring::simulation
