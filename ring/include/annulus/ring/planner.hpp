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

/// How a schedule is carried out. What is best depends on the place: see for_place().
struct PlanOptions {
  /// Allgather gathers by groups of key/value heads so that one group's buffer stays below this.
  std::int64_t gather_bytes = std::int64_t{256} << 20;
  /// Limit for a rank's partial results, or the size of its output in float32 if that is more
  /// (where pass_q goes round, seven times that). If they do not fit, the ring runs once per group
  /// of key/value heads. 0: all heads at once, and results are combined as soon as there are two.
  std::int64_t result_bytes = 0;
  /// In a ring, columns come straight from their owners instead of from neighbour to neighbour,
  /// where that sends no more bytes between nodes: where the ranks of a ring are all on one node,
  /// or each on another. None pass through other ranks then.
  bool direct = false;
  /// If all receive buffers fit in this, each hop of the ring has its own, and transfers run ahead
  /// of the computation. Otherwise two buffers alternate. In allgather, kernels can await their
  /// columns only if all columns fit in this.
  std::int64_t prefetch_bytes = 0;
  /// True if kernels that can await columns may begin before these have arrived, if the transport
  /// allows it. Not for ranks that share a GPU: a waiting kernel would block the other ranks.
  bool await_columns = true;
  /// For hybrid: the number of ranks that exchange heads, a divisor of those along the sequence. 0:
  /// the size of the last of several sequence axes; of one, its largest common divisor with the K
  /// of a rank. With 1, hybrid is the ring, and with all ranks ulysses. Only `auto` compares other
  /// degrees.
  int ulysses_degree = 0;
  /// For double_ring: the number of ranks of a row, a divisor of those along the sequence. 0:
  /// ranks_per_row().
  int inner_size = 0;
  /// The candidate that computes what it takes, whatever is predicted of the others. "": blocks go
  /// to the one that is predicted to be fastest.
  std::string preferred;
  /// For ulysses and hybrid: heads are exchanged in groups, each of at least this many bytes of
  /// queries, so that transfers run beside the computation. 0: kDefaultHeadGroupBytes.
  std::int64_t head_group_bytes = 0;
  /// The dtype of partial results' LSE. Rounding it to float32 costs a float32 run more accuracy
  /// than
  /// all the rest, so float32 problems always use float64. Devices give it in float32 for half
  /// types.
  DType lse_dtype = DType::float64;
  /// The dtype in which gradients of keys and values go to their owners, where they are not complete
  /// yet: float32, or bfloat16, which halves the bytes. Each part is then rounded once, and the
  /// owner adds the parts in float32. float64 problems keep to float64.
  DType grad_wire = DType::float32;

  /// The options that suit the kernels and the memory of a place.
  static PlanOptions for_place(Place place);
};

/// A block that a kernel refused when it was prepared. The planner gives it, and all blocks of its
/// class, to others. Blocks are of one class if they differ only in where they lie: all that are
/// fully visible, but for those of a rank's own columns, and under a band (causal, window) those
/// with the same distance between rows and columns.
struct Refusal {
  std::string implementation;
  PositionRanges rows;
  PositionRanges columns;
  BatchRange batches;      ///< of the whole problem
  std::int64_t heads = 0;  ///< number of query heads
  bool full = false;       ///< as Block::full
  std::string reason;
  /// True if the block was to write rounded results into the caller's output. The strides of that
  /// output may be the reason for the refusal.
  bool rounding = false;

  /// For refusals that were brought to their class's form, as refuse() does.
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

/// The input of the planner. Everything that it refers to must outlive it.
struct PlanInput {
  const AttentionProblem& problem;
  const ShardedOperands& operands;
  /// Each block goes to the candidate that accepts it and is predicted to be fastest (the first, if
  /// several are; or see PlanOptions::preferred), or is cut into smaller blocks if these are
  /// faster. Must not be empty where blocks are planned.
  std::vector<const Implementation*> candidates;
  Prices prices;
  PlanOptions options;
  std::vector<Refusal> refusals = {};  ///< see refuse()
  /// Plans of the backward pass; without a value, of the forward pass.
  std::optional<BackwardRequest> backward = {};
};

/// Makes plans that do without what kernels have refused.
void refuse(PlanInput& input, std::vector<Refusal> refusals);

/// With the prices that `model` has for the pass of the problem: see make_prices().
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

/// The variants that `name` ("auto" or a schedule) leaves open, in a fixed order. For `auto`, where
/// no degree is named, hybrid comes with every divisor of the ranks along the sequence up to the
/// number of a rank's heads. Where no inner size is named and ranks are on several nodes,
/// double_ring comes with ranks_per_row(). Of a named schedule, there is exactly one: see
/// PlanOptions. Throws the errors of parse_schedule().
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
  /// Of a problem whose bits are to be the same on any number of ranks: the variant that `auto`
  /// takes without that, and its predicted seconds.
  struct Unrestricted : ScheduleVariant {
    double seconds = 0;
  };
  std::optional<Unrestricted> unrestricted = {};
};

/// The variant of variants_for() that is predicted to be fastest. Of those that differ by less than
/// 1 %, which is noise, the one that needs least memory; of these, the first. A variant is not
/// played if one rank alone takes so long (least_seconds()) that it cannot win. Throws the errors
/// of parse_schedule(), and UnsupportedError when a named schedule cannot run: local, with a
/// sharded key/value sequence. On large meshes only some ranks are priced; see sample_ranks().
[[nodiscard]] ScheduleChoice choose_schedule(const PlanInput& input, std::string_view name);

/// Throws what choose_schedule() throws, without choosing.
void check_schedule(const PlanInput& input, std::string_view name);

/// The plan of one rank; what that rank's runner needs. Throws UnsupportedError with every reason
/// when no candidate takes a block.
[[nodiscard]] RankPlan make_rank_plan(const PlanInput& input, Schedule schedule, int rank);

/// The plans of these ranks, in ascending order.
[[nodiscard]] Plan make_plan(const PlanInput& input, Schedule schedule,
                             const std::vector<int>& ranks);
/// The plans of all ranks.
[[nodiscard]] Plan make_plan(const PlanInput& input, Schedule schedule);
/// The plans of these ranks one after another, where all of them would take too much memory.
void plan_each(const PlanInput& input, Schedule schedule, const std::vector<int>& ranks,
               const std::function<void(RankPlan)>& take);

/// The number of ranks that follow each other along the key/value sequence on one node, if that is
/// the same everywhere and divides their number; otherwise all of them. `node_of_rank`: by rank of
/// the mesh.
[[nodiscard]] int ranks_per_row(const NamedSharding& key, const std::vector<int>& node_of_rank);

/// The one of these ranks with most work: visible pairs times query heads.
[[nodiscard]] int busiest_rank(const PlanInput& input, const std::vector<int>& ranks);

/// At most so many ranks' plans are made of each schedule or candidate that is compared.
inline constexpr int kSampledRanks = 24;

/// All ranks of a small mesh; else at most `most` of them: the one with most work, and others
/// spread over the mesh. Of several nodes, all ranks of some, unless one has more than `most`.
[[nodiscard]] std::vector<int> sample_ranks(const PlanInput& input, int most = 48);

/// Which candidates were passed over for blocks of this plan, and why: "3 of 8 blocks of rank 2:
/// …".
[[nodiscard]] std::vector<std::pair<std::string, std::string>> passed_over_blocks(
    const PlanInput& input, const RankPlan& plan);

}  // namespace annulus::ring
