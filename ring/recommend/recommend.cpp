#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/layout_choice.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/recommend.hpp>

#include "face/sharded_options.hpp"
#include "recommend/planned_problem.hpp"

namespace annulus::ring {
namespace {

constexpr double kMiB = 1 << 20;

/// The problem on a mesh, laid out in one way.
struct MeshLayout {
  LaidOut laid_out;
  std::unique_ptr<Predictor> predictor = {};
  // The three members below serve the backward pass, if one is wanted. `backward_least` is infinite
  // if no schedule can run.
  std::unique_ptr<VariantSearch> backward_search = {};
  std::optional<std::pair<ScheduleVariant, PredictedRun>> backward = {};
  double backward_least = 0;
};

struct Candidate : Recommendation {
  MeshLayout* mesh_layout = nullptr;  // null if the problem does not fit on the mesh
  double estimate = 0;                // of total(); see Predictor::estimate()
};

// The last axis of a mesh lies inside nodes as far as possible. It is sp or tp: attention exchanges
// data along sp, and the output projection does along tp. Ranks of dp exchange nothing.
std::vector<MeshShape> meshes_of(const AttentionShape& shape, const WantedRanks& wanted) {
  if (wanted.mesh) return {*wanted.mesh};
  const int ranks = wanted.ranks;
  const int per_node = ranks / wanted.nodes;
  std::vector<MeshShape> meshes;
  for (int dp = 1; dp <= ranks; ++dp) {
    if (ranks % dp != 0 || (dp > 1 && shape.batch % dp != 0)) continue;
    for (int tp = 1; tp <= ranks / dp; ++tp) {
      if ((ranks / dp) % tp != 0 || (tp > 1 && shape.heads % tp != 0)) continue;
      if (wanted.most_head_shards > 0 && tp > wanted.most_head_shards) continue;
      const MeshAxis batch{"dp", dp};
      const MeshAxis heads{"tp", tp};
      const MeshAxis sequence{wanted.sequence_axis, ranks / dp / tp};
      meshes.push_back(MeshShape({batch, heads, sequence}));
      const bool both = heads.size > 1 && sequence.size > 1;
      if (both && wanted.nodes > 1 && tp <= per_node) {
        meshes.push_back(MeshShape({batch, sequence, heads}));
      }
    }
  }
  return meshes;
}

std::vector<int> nodes_of(const WantedRanks& wanted) {
  std::vector<int> nodes;
  if (wanted.nodes == 1) return nodes;
  for (int rank = 0; rank < wanted.ranks; ++rank) {
    nodes.push_back(rank / (wanted.ranks / wanted.nodes));
  }
  return nodes;
}

// Seconds to sum a tensor [b,t,n·Dv] over the P ranks that divide its heads. It is the shorter time
// of two algorithms: a ring of 2 (P − 1) steps, each with a P-th of the bytes, and a tree.
double all_reduce_seconds(const LaidOut& laid_out, DType dtype, const std::vector<int>& nodes) {
  const NamedSharding& output = laid_out.operands.output;
  const AxisNames& axes = output.spec()[2];
  const int ranks = output.mesh().size(axes);
  if (ranks == 1) return 0;
  const Extents shape = output.local_shape(0);
  const double bytes = static_cast<double>(shape[0] * shape[1] * shape[2] * shape[3] * ranks) *
                       static_cast<double>(size_of(dtype));
  const std::vector<int> group = output.mesh().group(0, axes);
  const bool crosses = !nodes.empty() && std::any_of(group.begin(), group.end(), [&](int rank) {
    return nodes[static_cast<std::size_t>(rank)] != nodes[static_cast<std::size_t>(group[0])];
  });
  const auto message = [&](double size) { return laid_out.model.transfer_seconds(size, crosses); };
  return std::min(2 * (ranks - 1) * message(bytes / ranks),
                  2 * std::ceil(std::log2(ranks)) * message(bytes));
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
      : wanted_(wanted),
        nodes_(nodes_of(wanted)),
        planned_(problem, registry, wanted.place, Presence::assumed, nodes_),
        flops_(forward_flops(problem.shape, visible_pairs())) {
    if (wanted.backward) {
      const BackwardRequest request{.grad_sinks = problem.sinks.has_value(),
                                    .grad_bias = problem.bias.has_value()};
      backward_.emplace(problem, registry, wanted.place, Presence::assumed, nodes_, request);
      // Five products of matrices instead of two: see RankPlan::backward_flops().
      const AttentionShape& s = problem.shape;
      flops_ += flops_ * static_cast<double>(3 * s.head_dim + 2 * s.value_dim) /
                static_cast<double>(s.head_dim + s.value_dim);
    }
    for (const MeshShape& mesh : meshes_of(problem.shape, wanted)) lay_out(mesh);
  }

  [[nodiscard]] std::vector<Recommendation> run() {
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.least < b.least; });
    for (Candidate& one : candidates_) {
      if (one.why_not.empty()) estimate(one);
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const auto& a, const auto& b) { return a.estimate < b.estimate; });
    for (Candidate& one : candidates_) {
      if (one.why_not.empty()) play(one);
    }
    choose();
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) { return rank(a) < rank(b); });
    put_fewest_head_shards_first();
    return {candidates_.begin(), candidates_.end()};
  }

 private:
  [[nodiscard]] double visible_pairs() const {
    const AttentionShape& s = problem_.shape;
    return static_cast<double>(problem_.mask
                                   .examine(0, s.batch, {GlobalPosition(0), s.query_length, 1},
                                            {GlobalPosition(0), s.kv_length, 1})
                                   .pairs);
  }

  void lay_out(const MeshShape& mesh) {
    LayoutOptions asked = problem_;
    asked.query_spec.reset();
    asked.kv_spec.reset();
    try {
      for (const LayoutKind layout : open_layouts(problem_, mesh, asked).layouts) {
        asked.layout = layout;
        lay_out(mesh, asked);
      }
    } catch (const UserError& error) {
      refuse(mesh, error);
    }
  }

  void refuse(const MeshShape& mesh, const UserError& error) {
    Candidate& refused = candidates_.emplace_back();
    refused.mesh = to_string(mesh);
    refused.why_not = fmt::format("cannot run: {}", error.what());
  }

  // The problem laid out in one way, with every schedule.
  void lay_out(const MeshShape& mesh, const LayoutOptions& asked) {
    layouts_.push_back(std::make_unique<MeshLayout>(MeshLayout{planned_.lay_out(mesh, asked)}));
    MeshLayout& made = *layouts_.back();
    const ShardedOperands& operands = made.laid_out.operands;
    Candidate candidate;
    candidate.mesh = to_string(mesh);
    candidate.mesh_layout = &made;
    candidate.transport = made.laid_out.model.transport;
    candidate.head_shards = operands.query.shards(2);
    candidate.projection =
        (backward_ ? 2 : 1) * all_reduce_seconds(made.laid_out, problem_.dtype, nodes_);
    if (operands.key.shards(1) > 1 || operands.query.shards(1) > 1) {
      candidate.layout = asked.layout;
    }
    const PlanInput input = planned_.input(made.laid_out);
    made.predictor = std::make_unique<Predictor>(input);
    if (backward_) {
      made.backward_search =
          std::make_unique<VariantSearch>(backward_->input(made.laid_out), backward_->schedule());
      made.backward_least = made.backward_search->least();
    }
    for (const ConsideredVariant& considered : variants_for(input, planned_.schedule())) {
      Candidate one = candidate;
      one.variant = considered.variant;
      if (!considered.obstacle.empty()) {
        one.why_not = "cannot run: " + considered.obstacle;
      } else if (!considered.pointless.empty()) {
        one.why_not = "not worthwhile: " + considered.pointless;
      } else {
        find_bounds(one);
      }
      candidates_.push_back(std::move(one));
    }
  }

  // Adds the backward pass; returns false if it takes more than `limit` seconds.
  [[nodiscard]] static bool add_backward(Candidate& candidate, double limit) {
    MeshLayout& made = *candidate.mesh_layout;
    if (!made.backward) made.backward = made.backward_search->fastest(limit);
    if (!made.backward) {
      made.backward_least = std::max(made.backward_least, limit);
      return false;
    }
    candidate.backward = made.backward->first;
    candidate.backward_run = made.backward->second;
    PredictedRun& run = candidate.run;
    for (const auto bytes :
         {&PredictedRun::shard_bytes, &PredictedRun::buffer_bytes, &PredictedRun::memory_bytes}) {
      run.*bytes = std::max(run.*bytes, candidate.backward_run.*bytes);
    }
    for (const auto bytes : {&PredictedRun::received_bytes, &PredictedRun::across_bytes}) {
      run.*bytes += candidate.backward_run.*bytes;
    }
    return candidate.backward_run.seconds <= limit;
  }

  [[nodiscard]] PlanInput input_of(const Candidate& candidate) const {
    return with_variant(planned_.input(candidate.mesh_layout->laid_out), *candidate.variant);
  }

  void find_bounds(Candidate& candidate) {
    try {
      PredictedRun least =
          candidate.mesh_layout->predictor->least(input_of(candidate), *candidate.variant);
      const double of_backward = candidate.mesh_layout->backward_least;
      if (of_backward == std::numeric_limits<double>::infinity()) {
        candidate.why_not = "cannot run: no schedule has a backward pass here";
        return;
      }
      candidate.least = std::exchange(least.seconds, 0) + of_backward + candidate.projection;
      candidate.run = least;
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

  // The shortest time so far of candidates with as many head shards.
  [[nodiscard]] double& fastest(const Candidate& candidate) {
    return fastest_.try_emplace(candidate.head_shards, std::numeric_limits<double>::infinity())
        .first->second;
  }

  static void set_slow(Candidate& candidate) {
    candidate.is_slow = true;
    candidate.why_not = fmt::format("slower: takes {} or more", milliseconds_text(candidate.least));
  }

  // A sample of a large mesh ranks the candidates, so that the most promising ones are simulated
  // first.
  void estimate(Candidate& candidate) {
    const double rest = candidate.projection + candidate.mesh_layout->backward_least;
    double& limit =
        hopeful_.try_emplace(candidate.head_shards, std::numeric_limits<double>::infinity())
            .first->second;
    PredictedRun least = candidate.run;
    least.seconds = candidate.least - rest;
    try {
      const PredictedRun run = candidate.mesh_layout->predictor->estimate(
          input_of(candidate), *candidate.variant, least, limit - rest);
      candidate.estimate = run.seconds + rest;
      if (std::isinf(run.seconds)) {
        candidate.least = std::max(candidate.least, limit);
        return;  // play() decides, since the candidate that set the limit may turn out not to fit
      }
      const bool fits = wanted_.memory_bytes == 0 || run.memory_bytes <= wanted_.memory_bytes;
      if (fits) limit = std::min(limit, candidate.estimate * kSampleError * kTie);
    } catch (const UserError& error) {
      candidate.why_not = fmt::format("cannot run: {}", error.what());
    }
  }

  // The candidate that needs least memory, among those that tie with the fastest so far; null if
  // none fits.
  [[nodiscard]] const Candidate* best_so_far(int head_shards) const {
    const Candidate* best = nullptr;
    for (const Candidate& one : candidates_) {
      if (one.head_shards != head_shards || !one.why_not.empty() || one.run.seconds == 0) continue;
      if (one.total() > fastest_.at(head_shards) * kTie) continue;
      if (best == nullptr || by_memory(one) < by_memory(*best)) best = &one;
    }
    return best;
  }

  static std::pair<double, double> by_memory(const Candidate& one) {
    return {one.run.memory_bytes, one.total()};
  }

  void play(Candidate& candidate) {
    const double limit = fastest(candidate) * kTie;
    if (candidate.least > limit) return set_slow(candidate);
    const Candidate* const best = best_so_far(candidate.head_shards);
    if (best != nullptr && candidate.run.memory_bytes >= best->run.memory_bytes &&
        candidate.least * kTie >= fastest(candidate)) {
      candidate.is_slow = true;
      candidate.why_not = fmt::format("at best a tie, and {} needs less memory", text_of(*best));
      return;
    }
    try {
      const std::optional<PredictedRun> run = candidate.mesh_layout->predictor->run(
          input_of(candidate), *candidate.variant,
          limit - candidate.projection - candidate.mesh_layout->backward_least);
      if (run) candidate.run = *run;
      if (!run || (backward_ && !add_backward(candidate, limit - candidate.total()))) {
        candidate.least = std::max(candidate.least, limit);
        candidate.run.seconds = candidate.backward_run.seconds = 0;
        return set_slow(candidate);
      }
    } catch (const UserError& error) {
      candidate.why_not = fmt::format("cannot run: {}", error.what());
      return;
    }
    candidate.rate =
        flops_ / (candidate.run.seconds + candidate.backward_run.seconds) / wanted_.ranks;
    if (is_too_large(candidate)) {
      candidate.why_not = too_much(candidate.run.memory_bytes, wanted_.memory_bytes, "");
      return;
    }
    fastest(candidate) = std::min(fastest(candidate), candidate.total());
  }

  // Leaves one recommendation for each number of head shards. Among candidates that tie, it is the
  // one that needs least memory.
  void choose() {
    std::map<int, Candidate*> best;
    for (Candidate& one : candidates_) {
      if (!one.why_not.empty()) continue;
      if (one.total() > fastest(one) * kTie) {
        one.least = one.total();
        one.is_slow = true;
        one.why_not = fmt::format("slower: takes {}", milliseconds_text(one.total()));
        continue;
      }
      Candidate*& chosen = best[one.head_shards];
      if (chosen == nullptr || by_memory(one) < by_memory(*chosen)) chosen = &one;
    }
    for (Candidate& one : candidates_) {
      const auto found = best.find(one.head_shards);
      if (one.why_not.empty() && found->second != &one) {
        one.ties = true;
        one.why_not = fmt::format("ties with {}", text_of(*found->second));
      }
    }
  }

  // If several recommendations tie with the fastest, the one with the fewest head shards comes
  // first, since it demands least of a model.
  void put_fewest_head_shards_first() {
    const double limit = candidates_.front().total() * kTie;
    auto first = candidates_.begin();
    for (auto one = first; one != candidates_.end() && one->why_not.empty(); ++one) {
      if (one->total() <= limit && one->head_shards < first->head_shards) first = one;
    }
    std::rotate(candidates_.begin(), first, first + 1);
  }

  static std::string text_of(const Candidate& one) {
    return fmt::format("{} {}{}", one.mesh,
                       one.layout ? fmt::format("{} ", annulus::name_of(*one.layout)) : "",
                       variant_text(*one.variant));
  }

  // The order of the answer.
  static std::tuple<int, double> rank(const Candidate& one) {
    if (one.why_not.empty()) return {0, one.total()};
    if (one.ties) return {1, one.total()};
    return {one.is_slow ? 2 : 3, one.least};
  }

  const WantedRanks& wanted_;
  std::vector<int> nodes_;
  PlannedProblem planned_;
  std::optional<PlannedProblem> backward_;
  const AttentionOptions& problem_ = planned_.options();
  double flops_;                                      // of all ranks
  std::vector<std::unique_ptr<MeshLayout>> layouts_;  // candidates refer to them
  std::vector<Candidate> candidates_;
  std::map<int, double> fastest_;  // seconds, by number of head shards, if they fit
  std::map<int, double> hopeful_;  // the limit for estimates, by number of head shards
};

}  // namespace

std::vector<Recommendation> recommend(const AttentionOptions& problem, const WantedRanks& wanted,
                                      const Registry& registry) {
  check_nodes(wanted);
  problem_of(problem).validate();
  if (wanted.mesh && wanted.mesh->ranks() != wanted.ranks) {
    throw ArgumentError("mesh", to_string(*wanted.mesh), fmt::format("{} ranks", wanted.ranks));
  }
  return Search(problem, wanted, registry).run();
}

std::vector<Recommendation> recommend(const AttentionOptions& problem, const WantedRanks& wanted) {
  return recommend(problem, wanted, Registry::standard());
}

PlannedAttention plan_attention(const AttentionOptions& options, const MeshShape& mesh, Place place,
                                int nodes) {
  const WantedRanks wanted{.ranks = mesh.ranks(), .nodes = nodes, .place = place};
  check_nodes(wanted);
  problem_of(options).validate();
  const Registry registry = Registry::standard();
  const PlannedProblem planned(options, registry, place, Presence::assumed, nodes_of(wanted));
  const LaidOut laid_out = planned.lay_out(mesh, options);
  const PlanInput open = planned.input(laid_out);
  const ScheduleChoice choice = choose_schedule(open, planned.schedule());
  const PlanInput input = with_variant(open, choice);
  return {make_plan(input, choice.schedule, simulated_ranks(input)), choice,
          laid_out.model.transport, predict_run(input, choice)};
}

}  // namespace annulus::ring
