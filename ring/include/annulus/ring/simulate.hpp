#pragma once

#include <vector>

#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Predicted seconds of one rank.
struct RankTimeline {
  double compute = 0;   ///< packing, kernels, and combining their results
  double transfer = 0;  ///< messages, hidden or not
  double exposed = 0;   ///< waiting for messages with nothing to compute
  double finish = 0;
};

/// Plays a plan as the executor obeys it. A rank packs, then computes its blocks in order; those of
/// a step wait for what the step before has received. Its transfers run beside that, step after
/// step, and start by the ways of the model's transport: between hosts ("mpi") when both sides have
/// computed the steps before; between GPUs ahead of the computation, unless they overwrite what it
/// uses, when both sides can ("nccl"), or when the receiver can and the sender has come to the step
/// ("peer"). Messages of one rank and step follow each other; links are otherwise free of
/// contention.
[[nodiscard]] std::vector<RankTimeline> simulate(const Plan& plan, const CostModel& model);

/// The finish of the slowest rank.
[[nodiscard]] double predicted_seconds(const Plan& plan, const CostModel& model);

}  // namespace annulus::ring
