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

inline constexpr std::int64_t kDefaultHeadGroupBytes = std::int64_t{8} << 20;

/// How a schedule is carried out. The best values depend on the place: see for_place().
struct PlanOptions {
  /// Allgather gathers groups of key/value heads, small enough that a group's buffer stays below
  /// this.
  std::int64_t gather_bytes = std::int64_t{256} << 20;
  /// Limit for a rank's partial results. It is never below the size of the rank's output in
  /// float32, or seven times that where the queries of pass_q go round. If the results do not fit,
  /// the ring runs once per group of key/value heads. 0: all heads at once, and results are
  /// combined as soon as there are two.
  std::int64_t result_bytes = 0;
  /// In a ring, columns come straight from their owners instead of from neighbour to neighbour, if
  /// that sends no more bytes between nodes: if all ranks of the ring are on one node, or each is
  /// on a node of its own.
  bool direct = false;
  /// If all receive buffers fit in this, each hop of the ring has its own, and transfers run ahead
  /// of the computation. Otherwise two buffers alternate. In allgather, kernels can await their
  /// columns only if all columns fit in this.
  std::int64_t prefetch_bytes = 0;
  /// True if kernels may begin before their columns have arrived; kernel and transport must allow
  /// it. Not for ranks that share a GPU: a waiting kernel would block the other ranks.
  bool await_columns = true;
  /// For hybrid: the number of ranks that exchange heads, a divisor of the ranks along the
  /// sequence. 0: the size of the last of several sequence axes or, for a single axis, the largest
  /// common divisor of its size and a rank's K. With 1, hybrid is the ring; with all ranks, it is
  /// ulysses. Only `auto` compares degrees.
  int ulysses_degree = 0;
  /// For double_ring: the number of ranks of a row, a divisor of the ranks along the sequence. 0:
  /// ranks_per_row().
  int inner_size = 0;
  /// The candidate that gets every block that it accepts, even if others are predicted to be
  /// faster. "": each block goes to the candidate with the shortest predicted time.
  std::string preferred;
  /// For ulysses and hybrid: heads are exchanged in groups, each of at least this many bytes of
  /// queries, so that transfers overlap the computation. 0: kDefaultHeadGroupBytes.
  std::int64_t head_group_bytes = 0;
  /// The dtype of partial results' LSE. Rounding it to float32 costs a float32 run more accuracy
  /// than all other roundings, so float32 problems always use float64. Devices return it in float32
  /// for half types.
  DType lse_dtype = DType::float64;
  /// The dtype of incomplete gradients of keys and values on their way to their owners: float32, or
  /// bfloat16, which halves the bytes. Each part is then rounded once, and the owner adds the parts
  /// in float32. float64 problems keep to float64.
  DType grad_wire = DType::float32;

  /// The options that suit the kernels and the memory of a place.
  static PlanOptions for_place(Place place);
};

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

/// A variant that `auto` looks at.
struct ConsideredVariant {
  ScheduleVariant variant;
  std::string obstacle;   ///< why it cannot run; empty if it can
  std::string pointless;  ///< why it is not worth planning, though it can run; empty if it is
};

/// The variants that `name` ("auto" or a schedule) leaves open, in a fixed order. For `auto`,
/// hybrid comes with every divisor of the ranks along the sequence up to the number of a rank's
/// heads, unless a degree is named; double_ring comes with ranks_per_row() if ranks are on several
/// nodes, unless an inner size is named. A named schedule has exactly one variant: see PlanOptions.
/// Throws the errors of parse_schedule().
[[nodiscard]] std::vector<ConsideredVariant> variants_for(const PlanInput& input,
                                                          std::string_view name);

/// The schedule chosen, and why.
struct ScheduleChoice : ScheduleVariant {
  struct PassedOver : ScheduleVariant {
    std::string reason;
    double seconds = 0;  ///< predicted; 0 if it was not
  };
  double seconds = 0;  ///< predicted; 0 if it was not needed
  std::vector<PassedOver> passed_over;
  /// The variant that `auto` would take, with its predicted seconds, if the problem did not require
  /// the same bits on any number of ranks.
  struct Unrestricted : ScheduleVariant {
    double seconds = 0;
  };
  std::optional<Unrestricted> unrestricted = {};
};

/// The variant of variants_for() with the shortest predicted time. If several differ by less than 1
/// %, which is noise, the one that needs least memory; of equals, the first. A variant is not
/// simulated if one rank alone takes so long (least_seconds()) that it cannot win. Throws the
/// errors of parse_schedule(), and UnsupportedError when a named schedule cannot run: local, with a
/// sharded key/value sequence; any other, if the sequence has no axis, not even one of a single
/// rank. The times are those of Predictor.
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
/// The plans of these ranks one after another, where all of them would take too much memory.
void plan_each(const PlanInput& input, Schedule schedule, const std::vector<int>& ranks,
               const std::function<void(RankPlan)>& take);

/// The number of ranks that follow each other along the key/value sequence on one node, if it is
/// the same on every node and divides the number of all ranks along the sequence; otherwise that
/// number. `node_of_rank`: by rank of the mesh.
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
/// Most and mean work of all ranks, from the work in the plans of some. Where ranks compute the
/// rows that they hold, it is counted for all ranks; where a schedule passes queries on or
/// exchanges heads, it is that of the planned ranks.
[[nodiscard]] WorkOfRanks work_of_ranks(const PlanInput& input, std::span<const RankWork> planned);

/// The candidates that were passed over for blocks of this plan, and why: "3 of 8 blocks of rank 2:
/// …".
[[nodiscard]] std::vector<std::pair<std::string, std::string>> passed_over_blocks(
    const PlanInput& input, const RankPlan& plan);

}  // namespace annulus::ring
