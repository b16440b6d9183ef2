#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/prices.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// The schedule of this name (docs/semantics.md §5). Throws ArgumentError for an unknown name.
[[nodiscard]] Schedule parse_schedule(std::string_view name);

/// A block that a kernel refused when it was prepared. The planner gives it, and all blocks of its
/// class, to other kernels. Blocks of a class differ only in their place: fully visible blocks of
/// other ranks' columns form one class; under a band (causal, window), so do blocks with the same
/// distance between rows and columns.
struct Refusal {
  std::string implementation;
  PositionRanges rows;
  PositionRanges columns;
  BatchRange batches;      ///< of the whole problem
  std::int64_t heads = 0;  ///< number of query heads
  bool full = false;       ///< as Block::full
  std::string reason;
  /// True if the block was to write rounded results into the caller's output, whose strides may be
  /// the reason for the refusal.
  bool rounding = false;

  /// Both refusals must be in the form that refuse() gives them.
  [[nodiscard]] bool is_of_the_class_of(const Refusal& other) const {
    return implementation == other.implementation && rounding == other.rounding &&
           batches == other.batches && heads == other.heads && full == other.full &&
           rows == other.rows && columns == other.columns;
  }
};

/// Refusals as JSON, to share them with other ranks, and back. Throws InternalError for any other
/// text.
[[nodiscard]] std::string to_json(std::span<const Refusal> refusals);
[[nodiscard]] std::vector<Refusal> parse_refusals(std::string_view text);

/// The input of the planner. All that it refers to must outlive it.
struct PlanInput {
  const AttentionProblem& problem;
  const ShardedOperands& operands;
  /// Each block goes to the fastest candidate, by prediction, that accepts it (the first of equals;
  /// or see PlanOptions::preferred), or is cut into smaller blocks if that is faster. Must not be
  /// empty where blocks are planned.
  std::vector<const Implementation*> candidates;
  Prices prices;
  PlanOptions options;
  std::vector<Refusal> refusals = {};  ///< see refuse()
  /// Plans of the backward pass; without a value, of the forward pass.
  std::optional<BackwardRequest> backward = {};
};

/// Adds refusals, so that later plans avoid the refused blocks.
void refuse(PlanInput& input, std::vector<Refusal> refusals);

/// The prices come from `model`, for the pass: see make_prices().
[[nodiscard]] PlanInput make_plan_input(const AttentionProblem& problem,
                                        const ShardedOperands& operands,
                                        std::vector<const Implementation*> candidates, Place place,
                                        CostModel model, const PlanOptions& options,
                                        std::optional<BackwardRequest> backward = {});

/// The options that plans of this variant are made with.
[[nodiscard]] PlanOptions with_variant(PlanOptions options, const ScheduleVariant& variant);
/// The same input with these options.
[[nodiscard]] PlanInput with_variant(PlanInput input, const ScheduleVariant& variant);

/// A variant that `auto` looks at.
struct ConsideredVariant {
  ScheduleVariant variant;
  std::string obstacle;   ///< why it cannot run; empty if it can
  std::string pointless;  ///< why it is not worth planning, though it can run; empty if it is
  [[nodiscard]] bool is_open() const { return obstacle.empty() && pointless.empty(); }
};

/// The variants that `name` ("auto" or a schedule) leaves open, in a fixed order. For `auto`,
/// hybrid comes with every divisor of the ranks along the sequence up to the number of a rank's
/// heads, unless a degree is named; double_ring comes with ranks_per_row() if ranks are on several
/// nodes, unless an inner size is named. A named schedule has exactly one variant: see PlanOptions.
/// Throws the errors of parse_schedule().
[[nodiscard]] std::vector<ConsideredVariant> variants_for(const PlanInput& input,
                                                          std::string_view name);

/// The variant of variants_for() with the shortest predicted time. If several differ by less than 1
/// %, which is noise, the one that needs least memory; of equals, the first. A variant is not
/// simulated if it cannot win because one rank alone takes too long (least_seconds()), or a sample
/// of a large mesh does (Predictor::estimate()). Throws the errors of parse_schedule(), and
/// UnsupportedError when a named schedule cannot run: local, with a sharded key/value sequence; any
/// other, if the sequence has no axis, not even one of a single rank. Predictor predicts the times.
[[nodiscard]] ScheduleChoice choose_schedule(const PlanInput& input, std::string_view name);

/// Throws what choose_schedule() throws, without choosing.
void check_schedule(const PlanInput& input, std::string_view name);

/// The plan of one rank, for its runner. Throws UnsupportedError with every reason when no
/// candidate takes a block.
[[nodiscard]] RankPlan make_rank_plan(const PlanInput& input, Schedule schedule, int rank);

/// The plans of these ranks, in ascending order.
[[nodiscard]] Plan make_plan(const PlanInput& input, Schedule schedule,
                             const std::vector<int>& ranks);
/// The plans of all ranks.
[[nodiscard]] Plan make_plan(const PlanInput& input, Schedule schedule);
/// Makes the plans of these ranks one after another, since all of them at once could take too much
/// memory.
void plan_each(const PlanInput& input, Schedule schedule, const std::vector<int>& ranks,
               const std::function<void(RankPlan)>& take);

/// The number of consecutive ranks along the key/value sequence on one node, if it is the same on
/// every node and divides the number of all ranks along the sequence. Otherwise, the number of all
/// these ranks. `node_of_rank`: by rank of the mesh.
[[nodiscard]] int ranks_per_row(const NamedSharding& key, const std::vector<int>& node_of_rank);

/// The rank among `ranks` with most work: visible pairs times query heads.
[[nodiscard]] int busiest_rank(const PlanInput& input, const std::vector<int>& ranks);

/// Work of a rank: visible pairs times query heads.
struct RankWork {
  int rank = 0;  ///< of the mesh
  double work = 0;
};
struct WorkOfRanks {
  double most = 0;  ///< of the rank with most
  double mean = 0;
};
/// The largest and the mean work of all ranks, given that of the planned ones. Where ranks compute
/// the rows that they hold, the work of all ranks is counted. Where a schedule passes queries on or
/// exchanges heads, the planned ranks stand for all.
[[nodiscard]] WorkOfRanks work_of_ranks(const PlanInput& input, std::span<const RankWork> planned);

/// The candidates that were passed over for blocks of this plan, and why: "3 of 8 blocks of rank 2:
/// …".
[[nodiscard]] std::vector<std::pair<std::string, std::string>> passed_over_blocks(
    const PlanInput& input, const RankPlan& plan);

}  // namespace annulus::ring
