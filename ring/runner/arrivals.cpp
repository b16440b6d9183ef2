#include "runner/arrivals.hpp"

#include <algorithm>

namespace annulus::ring {

Arrivals::Arrivals(const RankPlan& plan, MemoryPool& memory)
    : numbers_(plan.tasks.size()), of_(plan.tasks.size()) {
  const std::vector<const Block*> blocks = plan.all<Block>();
  const auto awaiting = std::count_if(blocks.begin(), blocks.end(),
                                      [](const Block* block) { return !block->arrivals.empty(); });
  if (awaiting == 0) return;
  memory_ = Tensor(DType::int32, {awaiting}, memory);
  auto* next = static_cast<std::int32_t*>(memory_.view().data());
  for (std::size_t t = 0; t < plan.tasks.size(); ++t) {
    const auto* block = std::get_if<Block>(&plan.tasks[t].work);
    if (block == nullptr || block->arrivals.empty()) continue;
    const auto column = [&](LocalPosition token) {
      return static_cast<std::int32_t>(token - block->columns.begin);
    };
    numbers_[t] = next++;
    beginnings_.push_back({numbers_[t], column(block->arrivals.front().columns.end())});
    for (const Arrival& arrival : block->arrivals) {
      of_[static_cast<std::size_t>(arrival.task)].push_back(
          {numbers_[t], column(arrival.columns.begin)});
    }
  }
}

void Arrivals::begin(const LocalOperations& operations, Stream& stream) const {
  for (const Announcement& one : beginnings_) operations.publish(one.column, one.number, stream);
}

void Arrivals::announce(std::size_t task, const LocalOperations& operations, Stream& stream) const {
  for (const Announcement& one : of_[task]) operations.publish(one.column, one.number, stream);
}

}  // namespace annulus::ring
