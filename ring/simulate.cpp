#include <algorithm>
#include <cstddef>

#include <annulus/ring/simulate.hpp>

namespace annulus::ring {
namespace {

double compute_seconds(const Plan& plan, const RankPlan& rank, const Step& step,
                       const CostModel& model) {
  double seconds = 0;
  for (const Block& block : step.blocks) {
    const double flops = 2.0 * static_cast<double>(block.pairs) *
                         static_cast<double>(block.heads.count) *
                         static_cast<double>(rank.local.head_dim + rank.local.value_dim);
    seconds += model.kernel_seconds(flops, static_cast<double>(block.rows.count));
    if (block.merge) {
      // Reads two partial results and writes one.
      const double values = static_cast<double>(rank.local.batch) *
                            static_cast<double>(block.rows.count) *
                            static_cast<double>(block.heads.count) *
                            static_cast<double>(plan.problem.shape.value_dim);
      seconds += 3 * static_cast<double>(size_of(plan.problem.dtype)) * values /
                 model.merge_bytes_per_second;
    }
  }
  return seconds;
}

double side_seconds(const std::vector<Transfer>& transfers, const CostModel& model) {
  // Messages of one step follow each other without a pause: what a message costs however short it
  // is counts once.
  const double pause = model.transfer_seconds(0);
  double seconds = transfers.empty() ? 0 : pause;
  for (const Transfer& transfer : transfers) {
    seconds += model.transfer_seconds(static_cast<double>(transfer.bytes)) - pause;
  }
  return seconds;
}

}  // namespace

std::vector<RankTimeline> simulate(const Plan& plan, const CostModel& model) {
  const std::size_t ranks = plan.ranks.size();
  std::vector<RankTimeline> timelines(ranks);
  std::vector<std::vector<int>> groups(ranks);
  std::size_t steps = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    groups[r] = plan.mesh.group(static_cast<int>(r), plan.sequence_axes);
    steps = std::max(steps, plan.ranks[r].steps.size());
  }
  std::vector<double> ready(ranks, 0.0);
  for (std::size_t s = 0; s < steps; ++s) {
    std::vector<double> next = ready;
    for (std::size_t r = 0; r < ranks; ++r) {
      const RankPlan& rank = plan.ranks[r];
      if (s >= rank.steps.size()) continue;
      const Step& step = rank.steps[s];
      double start = ready[r];
      for (const auto* side : {&step.sends, &step.receives}) {
        for (const Transfer& transfer : *side) {
          const int peer = groups[r][static_cast<std::size_t>(transfer.peer)];
          start = std::max(start, ready[static_cast<std::size_t>(peer)]);
        }
      }
      const bool moves = !step.sends.empty() || !step.receives.empty();
      const double transfer =
          std::max(side_seconds(step.sends, model), side_seconds(step.receives, model));
      const double compute = compute_seconds(plan, rank, step, model);
      const double computed = ready[r] + compute;
      const double arrived = moves ? start + transfer : ready[r];
      next[r] = std::max(computed, arrived);
      timelines[r].compute += compute;
      timelines[r].transfer += transfer;
      timelines[r].exposed += std::max(0.0, arrived - computed);
      timelines[r].finish = next[r];
    }
    ready = next;
  }
  return timelines;
}

double predicted_seconds(const Plan& plan, const CostModel& model) {
  double slowest = 0;
  for (const RankTimeline& timeline : simulate(plan, model)) {
    slowest = std::max(slowest, timeline.finish);
  }
  return slowest;
}

}  // namespace annulus::ring
