#pragma once

#include <memory>
#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/ring/executor.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

struct ShardedAttentionOptions {
  std::string implementation = "auto";
  /// For the CPU. On a GPU, start from PlanOptions::for_place(device.place()) and
  /// CostModel::hopper_nvlink(), or its kernels get blocks that only the slow one can take.
  PlanOptions plan;
  CostModel cost_model = CostModel::cpu_core();
  ExecutorOptions executor;
  Transport transport = Transport::automatic;  ///< between GPUs; of no meaning to host memory
};

/// The one line through the house: problem + mesh + shardings → plan → executor → output.
///
///     ShardedAttention attention(problem, operands, mesh, registry, device, options);
///     attention.run({query, key, value, output, lse});   // as often as wanted
class ShardedAttention {
 public:
  /// Collective over the mesh: either all ranks get the object, or all throw the same error. The
  /// references must outlive it.
  ShardedAttention(const AttentionProblem& problem, const ShardedOperands& operands, Mesh& mesh,
                   const Registry& registry, Device& device,
                   const ShardedAttentionOptions& options);

  /// Collective over the mesh; see Executor::run.
  void run(const LocalTensors& tensors) { executor_->run(tensors); }

  [[nodiscard]] const RankPlan& rank_plan() const noexcept { return executor_->plan(); }
  [[nodiscard]] const ScheduleChoice& schedule() const noexcept { return schedule_; }
  /// Names of the implementations that compute this rank's blocks: "sdpa+native".
  [[nodiscard]] std::string implementations() const { return executor_->implementations(); }
  /// See Executor::extra_bytes.
  [[nodiscard]] std::size_t extra_bytes() const { return executor_->extra_bytes(); }
  /// What carries the transfers: "mpi", "nccl", "peer", "self".
  [[nodiscard]] const std::string& transport() const noexcept { return transport_; }
  /// Whether partial results were rounded to the problem's dtype before they are merged.
  [[nodiscard]] bool merges_rounded() const { return executor_->merges_rounded(); }
  /// Who could compute the problem, and why the others cannot: some of them just some of this
  /// rank's blocks.
  [[nodiscard]] Selection selection() const;
  /// See Executor::block_implementations.
  [[nodiscard]] std::vector<const Implementation*> block_implementations() const {
    return executor_->block_implementations();
  }

 private:
  ScheduleChoice schedule_;
  std::string transport_;
  Selection selection_;
  std::unique_ptr<Executor> executor_;
};

}  // namespace annulus::ring
