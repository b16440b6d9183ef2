#include "simulation/state.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include <annulus/partition/named_sharding.hpp>

namespace annulus::ring::simulation {
namespace {

std::int64_t nanoseconds(double seconds) {
  return std::llround(seconds * 1e9);
}

}  // namespace

std::uint32_t RankState::queue_of(std::uint32_t axes) const {
  const auto found = std::ranges::find(queues, axes, &QueueState::axes);
  return static_cast<std::uint32_t>(found - queues.begin());
}

bool RankState::complete() const {
  if (steps < script.steps.size()) return false;
  for (std::size_t q = 0; q < queues.size(); ++q) {
    if (queues[q].done < script.queues[q].exchanges.size()) return false;
  }
  return untaken == 0;
}

std::string RankState::progress_text() const {
  std::string text =
      fmt::format("rank {} has computed {} of {} steps", script.rank, steps, script.steps.size());
  for (std::size_t q = 0; q < queues.size(); ++q) {
    const ExchangeQueue& queue = script.queues[q];
    text += fmt::format(" and done {} of {} exchanges along {}", queues[q].done,
                        queue.exchanges.size(), to_string(queue.axes));
  }
  return text;
}

void RankState::record_step(double now) {
  if (script.labels.empty()) return;
  const TraceLabel& label = script.labels[script.steps[steps].task];
  const std::int64_t begin = nanoseconds(step_begin);
  const std::int64_t before = nanoseconds(last_end);
  if (before < begin) {
    spans.push_back({{TraceCategory::wait, "transfer", label.step}, "compute", before, begin});
  }
  if (begin < nanoseconds(now)) spans.push_back({label, "compute", begin, nanoseconds(now)});
}

void record(const Flow& flow, double now, std::span<RankState> states) {
  const auto add = [&](std::uint32_t r, std::uint32_t q, std::uint32_t peer, bool incoming) {
    if (r == kAbsent) return;
    RankState& state = states[r];
    if (state.script.labels.empty()) return;
    const std::uint32_t exchange = incoming ? state.queues[q].done : flow.sender_exchange;
    TraceLabel label = state.script.labels[state.script.queues[q].exchanges[exchange].task];
    if (peer != kAbsent) {
      label.messages = {{states[peer].script.rank, std::llround(flow.bytes), incoming}};
    }
    state.spans.push_back(
        {std::move(label), "communication", nanoseconds(flow.begin), nanoseconds(now)});
  };
  add(flow.receiver, flow.receiver_queue, flow.sender, true);
  add(flow.sender, flow.sender_queue, flow.receiver, false);
}

}  // namespace annulus::ring::simulation
