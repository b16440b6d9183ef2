#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus::ring {

ShardedAttention::ShardedAttention(const AttentionProblem& problem, const ShardedOperands& operands,
                                   Mesh& mesh, const Registry& registry, Device& device,
                                   const ShardedAttentionOptions& options) {
  Group& group = mesh.group(operands.key.spec()[1], device.place());
  executor_ = collectively(mesh.world(), [&] {
    problem.validate();
    schedule_ = choose_schedule(problem, operands, options.plan, options.cost_model);
    selection_ = registry.select(options.implementation, problem, device.place());
    return std::make_unique<Executor>(
        problem, make_rank_plan(problem, operands, schedule_.schedule, options.plan, mesh.rank()),
        selection_, group, device, mesh.watchdog(), options.executor);
  });
}

}  // namespace annulus::ring
