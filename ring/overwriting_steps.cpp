#include "overwriting_steps.hpp"

#include <algorithm>
#include <cstddef>
#include <set>

namespace annulus::ring {

std::vector<bool> overwriting_steps(const RankPlan& plan) {
  const auto memory_of = [&](int buffer) {
    while (plan.buffers[static_cast<std::size_t>(buffer)].reuses >= 0) {
      buffer = plan.buffers[static_cast<std::size_t>(buffer)].reuses;
    }
    return buffer;
  };
  std::vector<bool> result;
  std::set<int> used;
  for (const Step& step : plan.steps) {
    result.push_back(std::any_of(
        step.receives.begin(), step.receives.end(),
        [&](const Transfer& receive) { return used.contains(memory_of(receive.buffer)); }));
    for (const Block& block : step.blocks) used.insert(memory_of(block.buffer));
  }
  return result;
}

}  // namespace annulus::ring
