#include "runner/progress.hpp"

#include <algorithm>
#include <variant>

#include <fmt/format.h>

namespace annulus::ring {
namespace {

// A block of this many operations takes a device at least a millisecond, so marking its end costs
// nothing in comparison.
constexpr double kLongFlops = 1e12;

}  // namespace

Progress::Progress(const RankPlan& plan, Place place, Stream& computing,
                   const std::vector<ExchangeQueue>& queues)
    : plan_(plan), place_(place), computing_(computing), queues_(queues) {
  std::uint32_t marks = 0;
  marked_through_.reserve(plan.tasks.size());
  for (const Task& task : plan.tasks) marked_through_.push_back(marks += is_long(task) ? 1U : 0U);
}

void Progress::begin() const {
  if (!marked_through_.empty() && marked_through_.back() > 0) computing_.mark(0);
}

void Progress::mark(std::size_t task) const {
  if (is_long(plan_.tasks[task])) computing_.mark(marked_through_[task]);
}

std::uint64_t Progress::moved() const {
  std::uint64_t marks = computing_.marked();
  for (const ExchangeQueue& queue : queues_) marks = marks << 20U ^ queue.stream().marked();
  return marks;
}

bool Progress::is_under_way() const {
  return std::ranges::any_of(queues_, &ExchangeQueue::is_under_way);
}

bool Progress::awaits_only_itself() const {
  return std::ranges::all_of(queues_, [&](const ExchangeQueue& queue) {
    const std::vector<Dependency>* awaited = queue.awaited();
    return awaited == nullptr || std::ranges::any_of(*awaited, [&](const Dependency& d) {
             return computing_.marked() < marked_through_[static_cast<std::size_t>(d.task)];
           });
  });
}

std::string Progress::describe() const {
  for (const ExchangeQueue& queue : queues_) {
    if (std::string text = queue.describe(); !text.empty()) return text;
  }
  return fmt::format("waiting for {} to compute", to_string(place_));
}

bool Progress::is_long(const Task& task) const {
  if (const auto* block = std::get_if<Block>(&task.work)) return plan_.flops(*block) >= kLongFlops;
  const auto* block = std::get_if<BackwardBlock>(&task.work);
  return block != nullptr && plan_.backward_flops(*block) >= kLongFlops;
}

}  // namespace annulus::ring
