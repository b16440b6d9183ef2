#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <set>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/recommend.hpp>
#include <annulus/ring/simulate.hpp>

#include "tuning/parameters.hpp"

namespace annulus::ring {
namespace {

constexpr double kMiB = 1 << 20;
constexpr std::array kLayouts{LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
                              LayoutKind::balanced};

/// The problem laid out in some way.
struct LaidOut {
  ShardedOperands operands;
  CostModel model;
  std::vector<const Implementation*> implementations;
  std::vector<int> sample = {};  // ranks whose plans are made
};

struct Candidate : Recommendation {
  const LaidOut* laid_out = nullptr;  // null for a mesh that the problem cannot be laid on
};

// Sizes of dp, tp and sp. Attention exchanges data only along sp, so sp is laid inside nodes as far
// as possible.
std::vector<MeshShape> meshes_of(const AttentionShape& shape, const WantedRanks& wanted) {
  const int ranks = wanted.ranks;
  std::vector<MeshShape> meshes;
  for (int dp = 1; dp <= ranks; ++dp) {
    if (ranks % dp != 0 || (dp > 1 && shape.batch % dp != 0)) continue;
    for (int tp = 1; tp <= ranks / dp; ++tp) {
      if ((ranks / dp) % tp != 0 || (tp > 1 && shape.heads % tp != 0)) continue;
      meshes.push_back(
          MeshShape({{"dp", dp}, {"tp", tp}, {wanted.sequence_axis, ranks / dp / tp}}));
    }
  }
  return meshes;
}

// All layouts are the same on a mesh that leaves the sequence whole.
bool without_shards(const MeshShape& mesh) {
  return mesh.axes().back().size == 1;
}

std::vector<int> nodes_of(const WantedRanks& wanted) {
  std::vector<int> nodes;
  if (wanted.nodes == 1) return nodes;
  for (int rank = 0; rank < wanted.ranks; ++rank) {
    nodes.push_back(rank / (wanted.ranks / wanted.nodes));
  }
  return nodes;
}

void check_nodes(const WantedRanks& wanted) {
  if (wanted.ranks >= 1 && wanted.nodes >= 1 && wanted.ranks % wanted.nodes == 0) return;
  throw ArgumentError("nodes", std::to_string(wanted.nodes),
                      fmt::format("a divisor of {} ranks", wanted.ranks));
}

std::string too_much(double bytes, double limit, const char* how_much) {
  return fmt::format("does not fit: needs {}{:.0f} MiB per rank, of {:.0f}", how_much, bytes / kMiB,
                     limit / kMiB);
}

/// Compares all candidates, simulating as few as possible.
class Search {
 public:
  Search(const AttentionOptions& problem, const WantedRanks& wanted, const Registry& registry)
      : problem_(problem),
        wanted_(wanted),
        registry_(registry),
        nodes_(nodes_of(wanted)),
        flops_(forward_flops(problem.shape, visible_pairs())) {
    for (const MeshShape& mesh : meshes_of(problem.shape, wanted)) {
      if (problem.layout || without_shards(mesh)) {
        lay_out(mesh, problem.layout);
        continue;
      }
      for (const LayoutKind layout : kLayouts) lay_out(mesh, layout);
    }
  }

  [[nodiscard]] Recommendations run() {
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.least < b.least; });
    for (Candidate& one : candidates_) {
      if (one.why_not.empty()) play(one);
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) {
                       if (a.why_not.empty() != b.why_not.empty()) return a.why_not.empty();
                       if (!a.why_not.empty()) return false;
                       return std::pair(a.run.seconds, a.run.memory_bytes) <
                              std::pair(b.run.seconds, b.run.memory_bytes);
                     });
    return {{candidates_.begin(), candidates_.end()}, most_planned_};
  }

 private:
  [[nodiscard]] double visible_pairs() const {
    const AttentionShape& s = problem_.shape;
    return static_cast<double>(problem_.mask
                                   .examine(0, s.batch, {GlobalPosition(0), s.query_length, 1},
                                            {GlobalPosition(0), s.kv_length, 1})
                                   .pairs);
  }

  // The problem laid out in one way, with every schedule.
  void lay_out(const MeshShape& mesh, std::optional<LayoutKind> layout) {
    LayoutOptions asked = problem_;
    asked.query_spec.reset();
    asked.kv_spec.reset();
    asked.layout = layout;
    Candidate candidate;
    candidate.mesh = to_string(mesh);
    if (!without_shards(mesh)) candidate.layout = layout;
    try {
      layouts_.push_back(std::make_unique<LaidOut>(
          LaidOut{shard_operands(problem_, mesh, default_layout(problem_, mesh, asked)),
                  problem_.cost_model ? *problem_.cost_model : CostModel::for_place(wanted_.place),
                  registry_
                      .select(problem_.implementation.empty() ? "auto" : problem_.implementation,
                              problem_, wanted_.place, Presence::assumed)
                      .candidates}));
      LaidOut& made = *layouts_.back();
      settle_transport(made.model, problem_.transport, made.operands.key, nodes_);
      candidate.laid_out = &made;
      candidate.transport = made.model.transport;
      const PlanInput input = input_of(made);
      made.sample = sample_ranks(input, kSampledRanks);
      most_planned_ = std::max(most_planned_, made.sample.size());
      const int busiest = busiest_rank(input, made.sample);
      const std::string schedule = problem_.schedule.empty() ? "auto" : problem_.schedule;
      for (const ConsideredVariant& considered : variants_for(input, schedule)) {
        Candidate one = candidate;
        one.variant = considered.variant;
        if (!considered.obstacle.empty()) {
          one.why_not = "cannot run: " + considered.obstacle;
        } else if (!considered.pointless.empty()) {
          one.why_not = "not worthwhile: " + considered.pointless;
        } else {
          find_bounds(one, busiest);
        }
        candidates_.push_back(std::move(one));
      }
    } catch (const UserError& error) {
      candidate.why_not = fmt::format("cannot run: {}", error.what());
      candidates_.push_back(std::move(candidate));
    }
  }

  [[nodiscard]] PlanInput input_of(const LaidOut& laid_out) const {
    PlanInput input =
        make_plan_input(problem_, laid_out.operands, laid_out.implementations, wanted_.place,
                        laid_out.model, plan_options(problem_, wanted_.place));
    input.prices.node_of_rank = nodes_;
    return input;
  }
  [[nodiscard]] PlanInput input_of(const Candidate& candidate) const {
    PlanInput input = input_of(*candidate.laid_out);
    input.options = with_variant(input.options, *candidate.variant);
    return input;
  }

  // Finds lower bounds from the plan of one rank.
  void find_bounds(Candidate& candidate, int rank) {
    const PlanInput input = input_of(candidate);
    try {
      const RankPlan plan = make_rank_plan(input, candidate.variant->schedule, rank);
      candidate.least = least_seconds(plan, input.prices);
      add_memory(candidate.run, plan);
    } catch (const UserError& error) {
      candidate.why_not = fmt::format("cannot run: {}", error.what());
    }
    if (is_too_large(candidate)) {
      candidate.why_not = too_much(candidate.run.memory_bytes, wanted_.memory_bytes, "at least ");
    }
  }

  [[nodiscard]] bool is_too_large(const Candidate& candidate) const {
    return wanted_.memory_bytes > 0 && candidate.run.memory_bytes > wanted_.memory_bytes;
  }

  void play(Candidate& candidate) {
    if (best_.size() == kRecommended && candidate.least > *best_.rbegin()) {
      candidate.is_slow = true;
      candidate.why_not = fmt::format("not worthwhile: takes {:.3f} ms or more, and {} take less",
                                      candidate.least * 1e3, kRecommended);
      return;
    }
    try {
      candidate.run =
          predict_run(input_of(candidate), *candidate.variant, candidate.laid_out->sample);
    } catch (const UserError& error) {
      candidate.why_not = fmt::format("cannot run: {}", error.what());
      return;
    }
    candidate.rate = flops_ / candidate.run.seconds / wanted_.ranks;
    if (is_too_large(candidate)) {
      candidate.why_not = too_much(candidate.run.memory_bytes, wanted_.memory_bytes, "");
      return;
    }
    best_.insert(candidate.run.seconds);
    if (best_.size() > kRecommended) best_.erase(std::prev(best_.end()));
  }

  const AttentionOptions& problem_;
  const WantedRanks& wanted_;
  const Registry& registry_;
  std::vector<int> nodes_;
  double flops_;                                   // of all ranks
  std::vector<std::unique_ptr<LaidOut>> layouts_;  // candidates refer to them
  std::vector<Candidate> candidates_;
  std::multiset<double> best_;  // seconds, of those that fit
  std::size_t most_planned_ = 0;
};

}  // namespace

Recommendations recommend(const AttentionOptions& problem, const WantedRanks& wanted,
                          const Registry& registry) {
  check_nodes(wanted);
  return Search(problem, wanted, registry).run();
}

Recommendations recommend(const AttentionOptions& problem, const WantedRanks& wanted) {
  return recommend(problem, wanted, Registry::standard());
}

PlannedAttention plan_attention(const AttentionOptions& options, const MeshShape& mesh, Place place,
                                int nodes) {
  const WantedRanks wanted{.ranks = mesh.ranks(), .nodes = nodes, .place = place};
  check_nodes(wanted);
  const AttentionProblem problem = under_policy(options.bias_policy, options);
  problem.validate();
  const ShardedOperands operands =
      shard_operands(problem, mesh, default_layout(problem, mesh, options));
  const auto named = [](const std::string& name) { return name.empty() ? "auto" : name; };
  const Registry registry = Registry::standard();
  const Selection selection =
      registry.select(named(options.implementation), problem, place, Presence::assumed);
  CostModel model = options.cost_model ? *options.cost_model : CostModel::for_place(place);
  settle_transport(model, options.transport, operands.key, nodes_of(wanted));
  PlanInput input = make_plan_input(
      problem, operands, selection.candidates, place, model,
      with_parameters(options.plan.value_or(PlanOptions::for_place(place)), options));
  input.prices.node_of_rank = nodes_of(wanted);
  const ScheduleChoice choice =
      choose_schedule(input, selection.schedule_for(named(options.schedule)));
  input.options = with_variant(input.options, choice);
  const std::vector<int> ranks = sample_ranks(input);
  return {make_plan(input, choice.schedule, ranks), choice, model.transport,
          predict_run(input, choice, ranks)};
}

}  // namespace annulus::ring
