#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/runner.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/ring/tuning.hpp>

namespace annulus::ring {

struct ShardedAttentionOptions {
  std::string implementation = "auto";
  std::string schedule = "auto";        ///< "auto" or a name of docs/semantics.md §5
  std::optional<PlanOptions> plan;      ///< PlanOptions::for_place(device.place()) if not given
  std::optional<CostModel> cost_model;  ///< CostModel::for_place(device.place()) if not given
  RunnerOptions runner;
  Transport transport = Transport::automatic;  ///< between GPUs; ignored for host memory
  /// How members that are left open above, and in `plan`, are chosen.
  TuningOptions tuning = {};
  Choice overlay = {};  ///< fills in what is left open above
  /// Plans the backward pass instead of the forward pass. Whatever is left open is then chosen by
  /// the cost model, without `tuning`.
  std::optional<BackwardRequest> backward = {};
};

/// A kind of call in words, for errors when ranks differ.
[[nodiscard]] std::string request_text(const BackwardRequest& request);

/// The whole path of one pass: problem + mesh + shardings → plan → runner → output, or gradients.
///
///     ShardedAttention attention(problem, operands, mesh, registry, device, options);
///     attention.run({query, key, value, output, lse});   // as often as wanted
class ShardedAttention {
 public:
  /// Collective over the mesh: either all ranks get the object, or all throw the same error. The
  /// references must outlive it. If a kernel refuses a block when it is prepared, all ranks replan
  /// the block for another kernel. If a choice of the tuning chain fails, the next link decides; an
  /// error then says what was tried. Other strides and masks do not change the decision.
  ShardedAttention(const AttentionProblem& problem, const ShardedOperands& operands, Mesh& mesh,
                   const Registry& registry, Device& device,
                   const ShardedAttentionOptions& options);
  ShardedAttention(const ShardedAttention&) = delete;
  ShardedAttention& operator=(const ShardedAttention&) = delete;

  /// Prepares for tensors of these strides, with a new plan if kernels refuse them. Collective over
  /// the mesh. All ranks throw the same error if the tensors of one do not fit (UserError) or one
  /// lacks memory (AgreedFailure); the object then stays usable as before.
  ///
  /// This and submit() and run() take BackwardLocalTensors if the backward pass was planned.
  template <class Tensors = LocalTensors>
  void prepare(const Tensors& tensors);
  /// Calls prepare(), then computes everything that a call computes on this rank, without any
  /// transfer, so that failures show while the ranks can still agree on them. Collective over the
  /// mesh. The outputs are undefined, as are the values that stand for other ranks' shards. All
  /// ranks throw the same error (UserError or AgreedFailure), after which the object can only be
  /// destroyed.
  void rehearse(const LocalTensors& tensors);
  /// See Runner::run_kernels. Only after a call with tensors of the same strides.
  template <class Tensors = LocalTensors>
  void run_kernels(const Tensors& tensors) {
    check_usable();
    runner_->run_kernels(views_of(tensors));
  }
  /// Replaces the mask for later calls: other lengths, other documents. If set_values() is enough,
  /// calls it and returns false. Otherwise the call is collective over the mesh. It waits for
  /// earlier calls and replans, with the same shardings; compiled kernels are kept. All ranks throw
  /// the same UserError for a mask that does not fit or that no implementation accepts (with a kept
  /// schedule, in this schedule); the object then stays usable as before.
  bool set_mask(const Mask& mask, NextSchedule next = NextSchedule::chosen);
  /// Replaces lengths and offsets that are call arguments. Does nothing and returns false if the
  /// mask differs from the planned one in anything else. Does not communicate.
  bool set_values(const Mask& mask);
  /// Submits a call and returns: see Runner::submit. Collective over the mesh. In the first call,
  /// all ranks agree on its tensors before anything is sent (prepare()). Later calls do not,
  /// because agreeing would cost the host more than the call itself. So call prepare() before using
  /// tensors with other strides. Otherwise a rank waits for its earlier calls and prepares by
  /// itself, and tensors that do not fit or that a kernel refuses are a failure of that rank alone.
  template <class Tensors = LocalTensors>
  void submit(const Tensors& tensors, ForeignStream* caller);
  /// See Runner::wait.
  void wait();
  /// submit() and wait().
  template <class Tensors = LocalTensors>
  void run(const Tensors& tensors);
  /// True if prepare() or a first call has prepared all ranks.
  [[nodiscard]] bool is_prepared() const noexcept { return prepared_; }

  [[nodiscard]] const RankPlan& rank_plan() const noexcept { return runner_->plan(); }
  /// Only rank 0 knows why other schedules were passed over.
  [[nodiscard]] const ScheduleChoice& schedule() const noexcept { return planning_->schedule; }
  /// The link of the tuning chain that decided, its choice, and why.
  [[nodiscard]] const Decision& decision() const noexcept { return decision_; }
  /// Names of the implementations that compute this rank's blocks: "sdpa+native"; "none" without
  /// blocks.
  [[nodiscard]] std::string implementations() const;
  /// The names on all ranks together, since one rank may have nothing to compute. Collective over
  /// the mesh.
  [[nodiscard]] std::string implementations_of_ranks() const;
  /// See Runner::extra_bytes.
  [[nodiscard]] std::size_t extra_bytes() const { return runner_->extra_bytes(); }
  /// True if a graph of the caller holds calls.
  [[nodiscard]] bool is_captured();
  /// See Runner::replays.
  [[nodiscard]] std::size_t replays() const { return runner_->replays(); }
  /// The name of the transport: "mpi", "nccl", "peer", "self".
  [[nodiscard]] const std::string& transport() const noexcept { return transport_; }
  /// True if this rank combines partial results, or adds up gradients of several blocks, that a
  /// kernel has rounded to less than float32: one rounding more than in an unsharded call.
  [[nodiscard]] bool reduces_rounded() const;
  /// See RankPlan::adds_rounded_gradients.
  [[nodiscard]] bool adds_rounded_gradients() const { return rank_plan().adds_rounded_gradients(); }
  /// The implementations that can compute the problem, and why the others cannot compute it, or not
  /// all of this rank's blocks.
  [[nodiscard]] Selection selection() const;
  /// The implementation that computes a block of the rank's plan.
  [[nodiscard]] const Implementation& implementation_of(const Tile& block) const {
    return *plan_input().candidates[static_cast<std::size_t>(block.implementation)];
  }
  /// The problem that was planned for, call arguments included …
  [[nodiscard]] const AttentionProblem& problem() const noexcept { return planning_->problem; }
  /// … and the mask of calls that pass no lengths and offsets.
  [[nodiscard]] const Mask& mask() const noexcept { return planning_->mask; }
  /// The same problem, with the values of a call.
  [[nodiscard]] AttentionProblem problem_of(const CallValues& values) const;
  /// The input of the plan.
  [[nodiscard]] const PlanInput& plan_input() const noexcept { return planning_->input; }

 private:
  // The input of plans, and the choice made.
  struct Planning {
    Planning(AttentionProblem asked, Selection selected, const ShardedOperands& operands,
             Place place, CostModel model, const PlanOptions& options,
             const std::optional<BackwardRequest>& backward)
        : problem(std::move(asked)),
          mask(problem.mask),
          bound(bound_of(problem)),
          selection(std::move(selected)),
          input(make_plan_input(bound, operands, selection.candidates, place, std::move(model),
                                options, backward)),
          open(options) {}
    // Fixes the input to this choice.
    void settle(const ScheduleChoice& choice) {
      schedule = choice;
      input.options = with_variant(open, choice);
    }
    AttentionProblem problem;
    Mask mask;  // of later calls
    AttentionProblem bound;
    Selection selection;
    PlanInput input;   // refers to the bound
    PlanOptions open;  // before a choice was made
    ScheduleChoice schedule;
    std::optional<ScheduleVariant> kept = {};  // from an earlier mask
  };
  [[nodiscard]] std::unique_ptr<Planning> make_planning(
      AttentionProblem problem, const std::optional<ScheduleVariant>& kept = {}) const;
  template <class Change, class Undo>
  void try_or_undo(const Change& change, const Undo& undo);
  void check_usable() const;
  [[nodiscard]] std::vector<CallTensor> views_of(const LocalTensors& tensors) const;
  [[nodiscard]] std::vector<CallTensor> views_of(const BackwardLocalTensors& tensors) const;
  void use_group();
  [[nodiscard]] std::vector<Group*> groups_of(const RankPlan& plan);
  void choose();
  void drop_runner();
  void retire(std::unique_ptr<Runner> runner);
  void plan_until_prepared(const std::vector<CallTensor>* tensors);

  ShardedOperands operands_;
  Mesh& mesh_;
  const Registry& registry_;
  Device& device_;
  ShardedAttentionOptions options_;
  Decision decision_;
  std::unique_ptr<Planning> planning_;
  Group* group_ = nullptr;
  std::string transport_;
  std::vector<std::unique_ptr<Runner>> retired_;
  std::unique_ptr<Runner> runner_;
  bool connected_ = false;
  bool prepared_ = false;  // on all ranks
};

}  // namespace annulus::ring
