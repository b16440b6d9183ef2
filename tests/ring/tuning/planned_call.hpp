#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/ring/sharded_attention.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tuning/choice.hpp"

namespace annulus::ring {

/// A call on `ranks` ranks along the sequence, of kernels that are assumed to be fast or slow.
struct PlannedCall {
  explicit PlannedCall(int ranks,
                       const std::vector<std::pair<std::string, double>>& kernels = {{"quick", 1},
                                                                                     {"slow", 0.8}})
      : mesh({{"sp", ranks}}) {
    problem.shape = {1, 4096, 4096, 8, 4, 64, 64};
    layout.query = layout.kv = PartitionSpec::parse("-,sp");
    for (const auto& [name, speed] : kernels) test::add_native(registry, name, speed);
  }

  [[nodiscard]] PlanInput input() {
    operands.push_back(std::make_unique<ShardedOperands>(shard_operands(problem, mesh, layout)));
    PlanInput made =
        make_plan_input(problem, *operands.back(),
                        registry.select(options.implementation, problem, Place::host()).candidates,
                        Place::host(), CostModel::cpu_core(), options.plan.value_or(PlanOptions()));
    made.prices.node_of_rank = node_of_rank;
    return made;
  }
  [[nodiscard]] OpenChoices open(const PlanInput& input) const {
    return open_choices(options, input, options.schedule, Place::host());
  }

  AttentionProblem problem;
  MeshShape mesh;
  OperandLayout layout;
  Registry registry;
  ShardedAttentionOptions options;
  std::vector<int> node_of_rank;
  std::vector<std::unique_ptr<ShardedOperands>> operands;  // inputs refer to them
};

}  // namespace annulus::ring
