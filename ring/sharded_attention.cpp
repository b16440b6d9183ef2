#include <cstddef>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus::ring {
namespace {

// All that decides what a rank plans, in short. Ranks that differ in it would send each other other
// messages than expected.
std::string fingerprint(const AttentionProblem& problem, const ShardedOperands& operands,
                        Schedule schedule, const PlanOptions& plan, Transport transport) {
  return fmt::format(
      "{} {}, mask {} ({:016x}), query {}, key/value {}, schedule {}, gather bytes {}, merge bytes "
      "{}, {} blocks, {}, transport {}",
      to_string(problem.shape), annulus::name_of(problem.dtype), to_string(problem.mask),
      problem.mask.digest(), to_string(operands.query), to_string(operands.key), name_of(schedule),
      plan.gather_bytes, plan.merge_bytes, plan.straight_blocks ? "straight" : "whole",
      plan.direct ? "direct" : "from neighbours", name_of(transport));
}

void check_same_plan(Control& world, const std::string& mine) {
  const std::vector<std::string> all = world.gather_text(mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw ArgumentError(fmt::format("attention on rank {}", rank), all[rank],
                        "what rank 0 computes, " + all[0]);
  }
}

}  // namespace

ShardedAttention::ShardedAttention(const AttentionProblem& problem, const ShardedOperands& operands,
                                   Mesh& mesh, const Registry& registry, Device& device,
                                   const ShardedAttentionOptions& options)
    : world_(mesh.world()) {
  collectively(mesh.world(), [&] { problem.validate(); });
  Group& group = mesh.group(operands.key.spec()[1], device.place(), options.transport);
  transport_ = group.transport();
  const PlanOptions plan = options.plan.value_or(PlanOptions::for_place(device.place()));
  CostModel model = options.cost_model.value_or(CostModel::for_place(device.place()));
  if (model.transports.contains(transport_)) model.use_transport(transport_);
  schedule_ = collectively(mesh.world(), [&] {
    return choose_schedule(problem, operands, options.schedule, plan, model);
  });
  check_same_plan(mesh.world(),
                  fingerprint(problem, operands, schedule_.schedule, plan, options.transport));
  executor_ = collectively(mesh.world(), [&] {
    selection_ = registry.select(options.implementation, problem, device.place());
    return std::make_unique<Executor>(
        problem, make_rank_plan(problem, operands, schedule_.schedule, plan, mesh.rank()),
        selection_, group, device, mesh.watchdog(), options.executor);
  });
  collectively(mesh.world(), [&] { executor_->connect(); });
}

void ShardedAttention::prepare(const LocalTensors& tensors) {
  collectively(world_, [&] { executor_->prepare(tensors); });
  prepared_ = true;
}

void ShardedAttention::run(const LocalTensors& tensors) {
  if (!prepared_) prepare(tensors);
  executor_->run(tensors);
}

Selection ShardedAttention::selection() const {
  Selection selection = selection_;
  const auto& of_blocks = executor_->passed_over();
  selection.passed_over.insert(selection.passed_over.end(), of_blocks.begin(), of_blocks.end());
  return selection;
}

}  // namespace annulus::ring
