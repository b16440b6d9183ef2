#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/ring/executor.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

struct ShardedAttentionOptions {
  std::string implementation = "auto";
  std::string schedule = "auto";        ///< or a name of SEMANTICS §5
  std::optional<PlanOptions> plan;      ///< PlanOptions::for_place(device.place()) if not given
  std::optional<CostModel> cost_model;  ///< CostModel::for_place(device.place()) if not given
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

  /// Makes ready for tensors of these strides; see Executor::prepare. Collective over the mesh: all
  /// ranks throw the same UserError when the tensors of one do not fit, and the object is as good
  /// as before.
  void prepare(const LocalTensors& tensors);
  /// Collective over the mesh. The first call prepares, and so do all ranks agree on its tensors
  /// before anything travels. Later ones do not, which would cost more than they do on the host:
  /// tensors that lie otherwise than before are best prepared. Where that is left out, a rank makes
  /// itself ready when it sees them, and tensors that do not fit are a failure of that rank alone;
  /// see Executor::run.
  void run(const LocalTensors& tensors);

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
  Control& world_;
  ScheduleChoice schedule_;
  std::string transport_;
  Selection selection_;
  std::unique_ptr<Executor> executor_;
  bool prepared_ = false;  // on all ranks
};

}  // namespace annulus::ring
