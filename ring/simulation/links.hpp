#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace annulus::ring::simulation {

/// Shared links, and the messages that move over them. A message at full speed takes a share of
/// each of its links. If the shares of a link add up to more than 1, all its messages slow down
/// alike. A message is as slow as its slowest link. Several messages that move over the same links
/// at the same time may be one flow; the flow's weight is their average number.
class Links {
 public:
  using Flow = std::uint32_t;
  static constexpr std::size_t kMaximumLinks = 4;  // of a message

  explicit Links(std::size_t count = 0) : links_(count) {}

  struct Demand {
    std::uint32_t link = 0;
    double share = 1;
  };

  /// Adds a flow of messages that start to move. Each message takes the shares in `demands`. The
  /// flow's speed is known after settle().
  void enter(Flow flow, double weight, const std::array<Demand, kMaximumLinks>& demands,
             std::size_t count) {
    if (flow >= flows_.size()) flows_.resize(flow + 1);
    flows_[flow] = {demands, count, weight};
    for (std::size_t i = 0; i < count; ++i) {
      Link& link = links_[demands[i].link];
      link.load += weight * demands[i].share;
      link.flows.push_back(flow);
      touch(demands[i].link);
    }
  }

  void leave(Flow flow) {
    for (std::size_t i = 0; i < flows_[flow].count; ++i) {
      const Demand& demand = flows_[flow].demands[i];
      Link& link = links_[demand.link];
      const auto found = std::find(link.flows.begin(), link.flows.end(), flow);
      *found = link.flows.back();
      link.flows.pop_back();
      // The load of an empty link is exactly 0, without rounding errors.
      link.load = link.flows.empty() ? 0 : link.load - flows_[flow].weight * demand.share;
      touch(demand.link);
    }
  }

  /// Calls changed(flow, speed) for every flow on a link that a flow has entered or left since the
  /// last call; several times if there are several such links.
  /// `speed`, at most 1, is that of all messages of the flow together.
  template <class Changed>
  void settle(const Changed& changed) {
    for (const std::uint32_t index : touched_) {
      Link& link = links_[index];
      link.touched = false;
      for (const Flow flow : link.flows) changed(flow, speed(flow));
    }
    touched_.clear();
  }

 private:
  struct Link {
    double load = 0;
    bool touched = false;
    std::vector<Flow> flows;
  };
  struct Entry {
    std::array<Demand, kMaximumLinks> demands;
    std::size_t count = 0;
    double weight = 1;
  };

  void touch(std::uint32_t index) {
    if (links_[index].touched) return;
    links_[index].touched = true;
    touched_.push_back(index);
  }

  [[nodiscard]] double speed(Flow flow) const {
    // If the shares add up to 1, apart from rounding, no message slows down.
    constexpr double kFull = 1 + 1e-9;
    double load = 1;
    for (std::size_t i = 0; i < flows_[flow].count; ++i) {
      load = std::max(load, links_[flows_[flow].demands[i].link].load);
    }
    return load <= kFull ? 1 : std::min(1.0, flows_[flow].weight / load);
  }

  std::vector<Link> links_;
  std::vector<Entry> flows_;
  std::vector<std::uint32_t> touched_;
};

}  // namespace annulus::ring::simulation
