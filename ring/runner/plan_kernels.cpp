#include "runner/plan_kernels.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <variant>

#include <annulus/core/error.hpp>

namespace annulus::ring {

Kernel& PlanKernels::of(const Tile& block) {
  std::unique_ptr<Kernel>& kernel = kernels_[static_cast<std::size_t>(block.implementation)];
  if (!kernel) kernel = implementation_of(block).make_kernel(problem_, device_);
  return *kernel;
}

std::vector<Refusal> PlanKernels::prepare(const BlockArguments& arguments,
                                          const PlanMemory& memory) {
  if (is_captured() && !graphs_.empty()) {
    retired_.push_back({std::move(kernels_), std::exchange(graphs_, {})});
  }
  kernels_.clear();
  kernels_.resize(implementations_.size());
  std::vector<Refusal> refusals;
  const auto try_block = [&](const Tile& block, bool rounding, const auto& prepare_kernel) {
    try {
      prepare_kernel(of(block));
    } catch (const UnsupportedError& refusal) {
      refusals.push_back({plan_.implementation_of(block), block.row_positions,
                          block.column_positions, plan_.global(block.batches), block.heads.count,
                          block.full, refusal.what(), rounding});
    }
  };
  for (std::size_t index = 0; index < plan_.tasks.size(); ++index) {
    const Task& task = plan_.tasks[index];
    if (const auto* block = std::get_if<Block>(&task.work)) {
      try_block(*block, is_rounded_at_once(*block), [&](Kernel& kernel) {
        kernel.prepare(arguments.of(index, *block), memory.state(block->result));
      });
    } else if (const auto* backward = std::get_if<BackwardBlock>(&task.work)) {
      try_block(*backward, false, [&](Kernel& kernel) {
        kernel.prepare_backward(arguments.of(*backward), arguments.gradients_of(*backward));
      });
    }
  }
  return refusals;
}

bool PlanKernels::is_captured() {
  const auto gone = [](const std::weak_ptr<void>& graph) { return graph.expired(); };
  std::erase_if(graphs_, gone);
  std::erase_if(retired_,
                [&](const Retired& one) { return std::ranges::all_of(one.graphs, gone); });
  return !graphs_.empty() || !retired_.empty();
}

// Into the caller's output, by a kernel that could as well write float32.
bool PlanKernels::is_rounded_at_once(const Block& block) const {
  return implementation_of(block).declares().results == ResultForm::either &&
         plan_.buffer(block.result.output.buffer).kind == BufferKind::caller;
}

}  // namespace annulus::ring
