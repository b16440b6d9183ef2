#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/place.hpp>
#include <annulus/core/position.hpp>
#include <annulus/mesh/mesh_shape.hpp>

/// The work of every rank as plain data. There is no other description of it: the runner executes
/// it, the simulation replays it, and costs, reports and traces read it. A plan is made by pure
/// functions without MPI and without a GPU.
///
/// A rank has buffers and tasks. A buffer holds tokens of one or more contents; the caller's
/// tensors are buffers too. Tasks copy, exchange, compute and reduce. Computing tasks (copies,
/// blocks and reductions) run one after the other in the order of the list. The exchanges of one
/// group receive in that order too. Everything else is ordered only by the dependencies that a task
/// names. The memory that an exchange sends may be overwritten once that exchange is released, even
/// if earlier ones are not.
namespace annulus::ring {

/// How data is sent (docs/semantics.md §5).
enum class Schedule : std::uint8_t { local, ring, double_ring, allgather, ulysses, hybrid, pass_q };

[[nodiscard]] std::string_view name_of(Schedule schedule) noexcept;

/// A schedule, and how it splits the ranks along the sequence.
struct ScheduleVariant {
  Schedule schedule = Schedule::local;
  int ulysses_degree = 0;  ///< of hybrid; 0 for all others
  int inner_size = 0;      ///< of double_ring; 0 for all others
  bool operator==(const ScheduleVariant&) const = default;
};

/// "hybrid (ulysses degree 8)".
[[nodiscard]] std::string variant_text(const ScheduleVariant& variant);

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
  /// In a ring, owners send columns straight to every rank, instead of from neighbour to neighbour,
  /// if that sends no more bytes between nodes: if all ranks of the ring are on one node, or each
  /// is on a node of its own.
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
  /// the ranks that follow each other on one node, if all nodes have equally many; else all.
  int inner_size = 0;
  /// The candidate that gets every block that it accepts, even if others are predicted to be
  /// faster. "": each block goes to the candidate with the shortest predicted time.
  std::string preferred = {};
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

/// The schedule chosen, and why.
struct ScheduleChoice : ScheduleVariant {
  struct PassedOver : ScheduleVariant {
    std::string reason;
    double seconds = 0;  ///< predicted; 0 if it was not predicted
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

/// The schedule of calls under another mask.
enum class NextSchedule : std::uint8_t {
  chosen,  ///< as for a first mask
  kept     ///< as it was: nothing is predicted, and each rank plans its own tasks only
};

/// The content of a buffer's tokens. Keys and values, and their gradients, have key/value heads;
/// all others have query heads.
enum class Content : std::uint8_t {
  query,
  key,
  value,
  output,
  lse,
  delta,  ///< rowsum(dO ∘ O) − dLSE of the backward pass (docs/semantics.md §1)
  grad_output,
  grad_query,
  grad_key,
  grad_value,
  bias,        ///< see ScoreTensors
  dense_mask,  ///< likewise
  maximum,     ///< of a row's logits: see SoftmaxState
  sum,         ///< Σ exp(logit − maximum), returned in place of an LSE
  grad_lse,
  grad_sinks,  ///< [n,M] or [1,M], of one token and one batch: see SinkGradient
  grad_bias    ///< as the bias
};

[[nodiscard]] std::string_view name_of(Content content) noexcept;
/// True if its heads are query heads.
[[nodiscard]] bool has_query_heads(Content content) noexcept;
/// True for what the backward pass computes.
[[nodiscard]] bool is_gradient(Content content) noexcept;

/// Heads [begin, begin + count) of a rank's shard.
struct HeadRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  [[nodiscard]] std::int64_t end() const noexcept { return begin + count; }
  bool operator==(const HeadRange&) const = default;
};

/// Batches [begin, begin + count) of a rank's shard.
struct BatchRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  [[nodiscard]] std::int64_t end() const noexcept { return begin + count; }
  bool operator==(const BatchRange&) const = default;
};

enum class BufferKind : std::uint8_t {
  caller,    ///< a tensor of the caller, of one content, all heads
  exchange,  ///< for messages: laid out [token][batch][content], so that any run of tokens is one
             ///< message
  local      ///< of one content, laid out as a tensor of the caller: [batch, tokens, heads, width]
};

/// Memory for all batches of the rank.
struct Buffer {
  BufferKind kind = BufferKind::caller;
  std::vector<Content> contents;
  DType dtype = DType::float32;
  /// The rank's own tokens are numbered by local position, other ranks' tokens from 0.
  LocalRange tokens;
  HeadRange heads;
  /// Index of an earlier buffer whose memory this one takes over; −1 for none.
  int reuses = -1;
  /// Global positions of the keys that a bias or a dense mask has entries for, in this order;
  /// without a value: all keys of the problem, in global order.
  std::optional<PositionRanges> columns = {};
};

/// Part of a buffer.
struct Region {
  int buffer = -1;
  LocalRange tokens;
  HeadRange heads;
  BatchRange batches;

  /// The same part of another buffer.
  [[nodiscard]] Region in(int other) const { return {other, tokens, heads, batches}; }
  /// Other tokens of the same buffer.
  [[nodiscard]] Region at(const LocalRange& other) const { return {buffer, other, heads, batches}; }
  bool operator==(const Region&) const = default;
};

/// One message: whole tokens of an exchange buffer.
struct Transfer {
  int peer = 0;    ///< the other side's rank in the group
  int origin = 0;  ///< the rank in the group that owns the tokens
  int buffer = 0;  ///< on this side
  LocalRange tokens;
  std::int64_t bytes = 0;
};

/// The stage of a task that another one waits for.
enum class Stage : std::uint8_t {
  done,     ///< computed, or received
  released  ///< of an exchange: the memory that it has sent may be overwritten
};

/// An earlier task of another queue. It stands for all tasks before it in that queue, too.
struct Dependency {
  int task = 0;
  Stage stage = Stage::done;
  bool operator==(const Dependency&) const = default;
};

/// Messages sent together, in any order. Both sides list a group's exchanges so that messages
/// between two ranks match in order.
struct Exchange {
  int group = 0;  ///< index into RankPlan::groups
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  /// Receiving also waits for these tasks, which still use the memory. Sending does not.
  std::vector<Dependency> receive_after;
};

/// Copies one content into the region `to`, from the tokens of buffer `from` that begin at
/// `from_begin`. Heads and batches are the same on both sides. A bias or a dense mask of all keys
/// is cut to the keys of the region's buffer.
struct Copy {
  Content content = Content::key;
  int from = 0;
  LocalPosition from_begin;
  Region to;

  [[nodiscard]] Region source() const {
    return {from, {from_begin, to.tokens.count}, to.heads, to.batches};
  }
};

/// Partial results, or their sum: an output and its LSE. Without an LSE (−1), plain numbers.
struct Result {
  Region output;
  int lse = -1;      ///< buffer of the LSE of the same tokens, heads and batches …
  int maximum = -1;  ///< … and of the maximum; −1 if it is not needed
  bool operator==(const Result&) const = default;
};

/// Columns of a block that arrive while its kernel runs.
struct Arrival {
  LocalRange columns;  ///< tokens of the key and value buffers
  int task = 0;        ///< the exchange that brings them
  bool operator==(const Arrival&) const = default;
};

/// The gradients that a tile of the backward pass computes: of its rows and their bias, of its
/// columns, or of both.
struct GradientSides {
  bool rows = true;
  bool columns = true;
};

/// Some rows against some columns, for some heads and batches: what a block reads.
struct Tile {
  LocalRange rows;  ///< tokens of the query buffer
  PositionRanges row_positions;
  LocalRange columns;  ///< tokens of the key and value buffers
  PositionRanges column_positions;
  HeadRange heads;  ///< query heads
  BatchRange batches;
  int query = 0, key = 0, value = 0;  ///< buffers
  int bias = -1, dense_mask = -1;     ///< buffers; −1 if the problem has none
  /// Visible (row, column) pairs over the batches, per head; see Mask::examine.
  std::int64_t pairs = 0;
  bool full = false;       ///< no pair is masked
  int implementation = 0;  ///< index into RankPlan::implementations
  GradientSides gradients = {};
};

/// A tile of the forward pass.
struct Block : Tile {
  Result result;                ///< where its softmax state is written
  std::optional<Result> state;  ///< of the same rows over other columns, to be continued
  /// True if its kernel begins before all columns have arrived, and awaits them
  /// (AttentionBlock::arrived_from). The arrivals, in their order, then fill the columns from the
  /// last to the first; later columns than the first arrival's are there from the beginning.
  bool awaits_columns = false;
  std::vector<Arrival> arrivals;
};

/// Computes delta of some rows, in float32, from the output and its gradient.
struct Delta {
  Region output;
  int grad_output = -1;  ///< buffers of the same rows, heads and batches
  int grad_lse = -1;     ///< −1: the LSE has no gradient
  int delta = -1;
};

/// The part of the sinks' gradient that comes from the rank's own rows: −Σ exp(sink − LSE) · delta.
/// If bits must not depend on the number of ranks, it is kept in several tokens, in float64: see
/// LocalOperations::sink_gradient().
struct SinkGradient {
  Region delta;  ///< all rows, heads and batches
  int lse = -1;  ///< buffer of the same
  int grad_sinks = -1;
};

/// A tile of the backward pass: adds its part of the gradients of its rows and of its columns. The
/// regions of a side that it does not compute have no buffer (−1).
struct BackwardBlock : Tile {
  int grad_output = -1, lse = -1, delta = -1;  ///< buffers of the rows
  Region grad_query;                           ///< the rows and query heads
  Region grad_key, grad_value;                 ///< the columns and their key/value heads
  Region grad_bias;           ///< as RankPlan::scores_of(); buffer −1: not wanted
  bool repeats_bits = false;  ///< see annulus::BackwardBlock
};

enum class Reduction : std::uint8_t {
  softmax,  ///< merges partial results, weighted by their LSE
  sum       ///< adds plain numbers: gradients
};

[[nodiscard]] std::string_view name_of(Reduction reduction) noexcept;

/// Combines the parts in this order and rounds once. Rows of `into` that no part covers get output
/// 0, LSE −∞ (or the LSE of the sinks, if they are added) and maximum −∞. The parts of a sum cover
/// `into`, and the first of them may be `into` itself; without parts, a sum is 0.
struct Reduce {
  Reduction reduction = Reduction::softmax;
  std::vector<Result> parts;
  Result into;
  /// Adds the sinks of its heads as a further part, with output 0 and their LSE. Only the reduction
  /// that completes a row adds its sinks.
  bool sinks = false;
  /// Writes the output unnormalised, and the sum in place of the LSE: see SoftmaxForm. Only the
  /// reduction that completes a row may.
  bool unnormalised = false;
};

struct Task {
  std::variant<Copy, Exchange, Block, Reduce, Delta, SinkGradient, BackwardBlock> work;
  int step = 0;  ///< its round of the schedule, for reports and messages
  std::vector<Dependency> after;
};

/// Ranks that exchange data.
struct PlanGroup {
  AxisNames axes;          ///< all ranks list groups along the same axes, in the same order
  std::vector<int> ranks;  ///< in the mesh, by rank in the group
  int rank = 0;            ///< of this rank
};

struct RankPlan {
  int rank = 0;  ///< in the mesh
  /// Sizes of the rank's shard; query_length and kv_length count local rows and columns.
  AttentionShape local;
  std::int64_t first_batch = 0;  ///< global index
  std::int64_t first_head = 0;
  /// Shapes of the rank's parts [b,n,t,S] of bias and dense mask, 1 where they are broadcast.
  std::optional<Extents> bias, dense_mask;
  std::int64_t sinks_per_head = 0;  ///< M, if their gradient is wanted
  std::vector<PlanGroup> groups;
  std::vector<std::string> implementations;  ///< names
  std::vector<Buffer> buffers;
  std::vector<Task> tasks;

  /// Converts local batches to global ones.
  [[nodiscard]] BatchRange global(BatchRange batches) const noexcept {
    return {first_batch + batches.begin, batches.count};
  }
  /// The tiles of the tasks that have one, forward or backward, in order.
  [[nodiscard]] std::vector<const Tile*> tiles() const;
  /// The tasks of one kind, in order.
  template <class Kind>
  [[nodiscard]] std::vector<const Kind*> all() const {
    std::vector<const Kind*> found;
    for (const Task& task : tasks) {
      if (const Kind* work = std::get_if<Kind>(&task.work)) found.push_back(work);
    }
    return found;
  }
  [[nodiscard]] const Buffer& buffer(int index) const {
    return buffers[static_cast<std::size_t>(index)];
  }
  /// All of a buffer.
  [[nodiscard]] Region whole(int buffer) const;
  /// The name of the implementation that computes a tile.
  [[nodiscard]] const std::string& implementation_of(const Tile& tile) const {
    return implementations[static_cast<std::size_t>(tile.implementation)];
  }
  /// The first buffer of the chain that shares memory with this one.
  [[nodiscard]] int memory_of(int buffer) const;
  /// The key/value heads that these query heads read.
  [[nodiscard]] HeadRange kv_heads_of(HeadRange heads) const;
  /// The shape of the rank's part of a bias, of its gradient or of a dense mask; null for other
  /// contents.
  [[nodiscard]] const Extents* scores(Content content) const;
  /// Elements per token and head: D, Dv, or 1 for LSE and the like; for bias and mask, the number
  /// of keys in the buffer, or 1.
  [[nodiscard]] std::int64_t width(const Buffer& buffer, Content content) const;
  /// Batches of each token: the rank's, or 1 for a bias or a mask that is broadcast.
  [[nodiscard]] BatchRange batches(const Buffer& buffer) const;
  /// The part of a bias or a mask that a block reads, or of the bias's gradient that it adds to.
  [[nodiscard]] Region scores_of(const Tile& block, int buffer) const;
  /// The caller's tensor of this content; −1 if there is none.
  [[nodiscard]] int caller_buffer(Content content) const;
  /// Bytes of one token of a buffer, for all batches.
  [[nodiscard]] std::int64_t token_bytes(const Buffer& buffer) const;

  /// Visible pairs times query heads.
  [[nodiscard]] double work() const;
  /// Operations of a block, for every visible pair and query head: 2 (D + Dv) forward and 2 (3 D +
  /// 2 Dv) backward. Each side of the gradients needs the first two products of the backward pass.
  [[nodiscard]] double flops(const Block& block) const;
  [[nodiscard]] double backward_flops(const Tile& block) const;
  [[nodiscard]] std::int64_t bytes_received() const;
  [[nodiscard]] std::int64_t bytes_sent() const;
  /// Bytes of memory of the buffers of one kind.
  [[nodiscard]] std::int64_t buffer_bytes(BufferKind kind) const;
  /// True if the rank combines partial results that a kernel has rounded to less than float32: one
  /// rounding more than in an unsharded call.
  [[nodiscard]] bool reduces_rounded() const;
  /// True if the rank adds parts of gradients that were rounded for sending: see
  /// PlanOptions::grad_wire.
  [[nodiscard]] bool adds_rounded_gradients() const;
};

/// A call of the backward pass, beyond its problem: docs/semantics.md §1.
struct BackwardRequest {
  bool grad_lse = false;    ///< the LSE has a gradient
  bool adds = false;        ///< gradients are added to the existing values
  bool grad_sinks = false;  ///< the gradient of the sinks is wanted
  bool grad_bias = false;   ///< the gradient of the bias is wanted
  bool operator==(const BackwardRequest&) const = default;
};

/// The plans of the ranks of a mesh, all or some.
struct Plan {
  AttentionProblem problem;
  MeshShape mesh;
  Schedule schedule = Schedule::local;
  std::string layout;           ///< of queries and keys: "zigzag", "zigzag,contiguous"
  std::vector<RankPlan> ranks;  ///< in order of rank
  double most_work = 0;         ///< of the most loaded rank of all
  double mean_work = 0;         ///< of all
  int ulysses_degree = 0;       ///< of hybrid: ranks that exchange heads; 0 for all others
  int inner_size = 0;           ///< of double_ring: ranks of a row; 0 for all others
  /// Set if this is a plan of the backward pass.
  std::optional<BackwardRequest> backward = {};

  /// Work of the most loaded rank over the mean, minus 1; 0 if there is no work.
  [[nodiscard]] double imbalance() const;
  /// True if ranks of the mesh are left out.
  [[nodiscard]] bool is_sample() const;
};

/// The predicted time and memory of a plan.
struct PredictedRun {
  double seconds = 0;         ///< of the slowest rank
  double shard_bytes = 0;     ///< of the caller's tensors, of the rank with most
  double buffer_bytes = 0;    ///< of the plan's buffers, of the rank with most
  double memory_bytes = 0;    ///< of both together, of the rank with most
  double received_bytes = 0;  ///< by all ranks
  double across_bytes = 0;    ///< the part of them from other nodes
};

/// A readable account of the whole plan: mesh, shards, totals per rank, and for up to `max_ranks`
/// ranks every task.
[[nodiscard]] std::string to_text(const Plan& plan, int max_ranks = 0);
/// The whole plan as JSON, every field named as here; "version": 3.
[[nodiscard]] std::string to_json(const Plan& plan);

}  // namespace annulus::ring
