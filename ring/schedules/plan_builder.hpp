#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include <annulus/ring/plan.hpp>

#include "schedules/block_finder.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {

/// Columns at rest in the buffers `key` and `value`, without gaps between them.
struct PlacedColumns {
  int key = 0;
  int value = 0;
  std::vector<PlacedPiece> pieces;
};

/// Buffers of what goes with rows; −1 for a bias or a mask that the problem lacks.
struct RowBuffers {
  int query = -1, bias = -1, dense_mask = -1;
  [[nodiscard]] int& operator[](Content content) {
    return content == Content::query ? query : content == Content::bias ? bias : dense_mask;
  }
};

/// What every schedule needs to fill a RankPlan. A schedule says what is copied, exchanged and
/// computed in which step. The rest follows from that: where results lie, how they are reduced, and
/// the dependencies.
///
/// Within a step, copies come first, then exchanges, then blocks and reductions, so what a step
/// receives is used by blocks of the same step or a later one.
class PlanBuilder {
 public:
  /// The buffers of every plan: the caller's tensors. kLse is the sum of an unnormalised output. If
  /// the problem has them, bias, dense mask and maximum follow: see RankPlan::caller_buffer.
  static constexpr int kQuery = 0, kKey = 1, kValue = 2, kOutput = 3, kLse = 4;
  /// The rows of the caller's tensors: see add_rows().
  static constexpr int kOwnRows = 0;

  /// Starts a plan with these buffers and the group along the key/value sequence axes, group 0.
  explicit PlanBuilder(const RankContext& context);

  /// What is known so far: sizes and buffers.
  [[nodiscard]] const RankPlan& plan() const noexcept { return plan_; }
  [[nodiscard]] BatchRange batches() const noexcept { return {0, plan_.local.batch}; }

  /// Index of a new buffer of `tokens`, to send from or to receive into.
  int add_exchange(std::vector<Content> contents, DType dtype, LocalRange tokens, HeadRange heads,
                   int reuses = -1);
  /// The same for keys and values.
  int add_key_value(LocalRange tokens, HeadRange kv_heads, int reuses = -1);
  /// Likewise, holding copies of the rank's own `tokens`, for sending.
  int add_packed(LocalRange tokens, HeadRange kv_heads);
  /// Copies the rank's own `tokens` into a buffer for keys and values, from token `to` on.
  void pack(LocalRange tokens, int buffer, LocalPosition to, int step = 0);
  /// What is sent where rows are sent: queries, and a bias and a mask whose rows differ.
  [[nodiscard]] std::vector<Content> sent_with_rows() const;
  /// The heads of such a content that query heads read: these, or the one that a bias or a mask has
  /// for all.
  [[nodiscard]] HeadRange heads_of(Content content, HeadRange heads) const;
  /// Index of a new exchange buffer of such a content, for rows and query heads, and of a bias or a
  /// mask for `columns`.
  int add_row_buffer(Content content, LocalRange rows, HeadRange heads, int reuses = -1,
                     std::optional<PositionRanges> columns = {});
  /// Copies the rank's own rows from `begin` on into such a buffer, for its heads.
  void copy_own(int step, Content content, LocalPosition begin, int to, LocalRange to_rows);
  /// Copies all batches of a content from the tokens of a buffer that begin at `from_begin`.
  void copy(int step, Content content, int from, LocalPosition from_begin, int to,
            LocalRange to_tokens, HeadRange heads);

  /// Copies results, of all heads of `from`, from its row `begin` on to `rows`: outputs, LSEs and
  /// maxima.
  void copy(int step, const Result& from, LocalPosition begin, const Result& to, LocalRange rows);

  /// Buffers for results that other ranks get: complete ones, rounded, or partial ones, as precise
  /// as partial results are. `reuses`: results whose memory they take over.
  [[nodiscard]] Result add_complete_results(LocalRange rows, HeadRange heads,
                                            const Result* reuses = nullptr);
  [[nodiscard]] Result add_partial_results(LocalRange rows, HeadRange heads,
                                           const Result* reuses = nullptr);
  /// The caller's output, LSE and maximum, for some heads.
  [[nodiscard]] Result own_results(HeadRange heads) const;

  /// The caller's tensors of the rank's own rows.
  [[nodiscard]] RowBuffers own_rows() const;
  /// Index of rows that lie in these buffers, at these positions, and whose results go to
  /// `results`: all its rows and heads. `complete`: these are not only parts of results.
  int add_rows(const RowBuffers& buffers, const PositionRanges& positions, const Result& results,
               bool complete);

  /// The rank's own columns, as they lie in the caller's tensors.
  [[nodiscard]] PlacedColumns own_columns() const;
  /// The query heads that read `kv_heads`.
  [[nodiscard]] HeadRange query_heads(HeadRange kv_heads) const;
  /// Computes those of the rows that see any of these columns, for these query heads.
  void compute(int step, int rows, HeadRange heads, const PlacedColumns& columns);
  /// The same for columns in one buffer that earlier exchanges fill from its end to its beginning.
  /// Prefers kernels that can await columns; these begin at once.
  void compute_awaiting(int step, int rows, HeadRange heads, const PlacedColumns& columns);
  /// After the last block of these rows and heads, or if there is none: their results are complete.
  /// No other rows or heads are computed in between.
  void complete(int step, int rows, HeadRange heads);
  /// Combines results; `complete` if these are not only parts again.
  void reduce(int step, std::vector<Result> parts, const Result& into, bool complete);

  /// Adds one message to the exchange of a step; none if it would be empty.
  void send(int step, int peer, int origin, int buffer, LocalRange tokens);
  void receive(int step, int peer, int origin, int buffer, LocalRange tokens);
  /// Messages of results: their outputs, LSEs and maxima, each for all runs of rows.
  void send(int step, int peer, int origin, const Result& results,
            const std::vector<LocalRange>& runs);
  void receive(int step, int peer, int origin, const Result& results,
               const std::vector<LocalRange>& runs);

  /// Returns the complete plan.
  [[nodiscard]] RankPlan finish();

 private:
  struct Rows {
    RowBuffers buffers;
    Result results;
    bool complete;
    BlockFinder finder;
  };

  [[nodiscard]] Rows& rows_of(int index) { return rows_[static_cast<std::size_t>(index)]; }
  void add_blocks(int step, const Rows& rows, const PlacedColumns& columns,
                  std::vector<Block> blocks, bool awaiting = false);
  [[nodiscard]] Result add_results(LocalRange rows, HeadRange heads, DType dtype, DType lse,
                                   const Result* reuses);
  [[nodiscard]] Exchange& exchange_of(int step);
  [[nodiscard]] Transfer transfer(int peer, int origin, int buffer, LocalRange tokens) const;

  const RankContext& context_;
  RankPlan plan_;
  std::deque<Rows> rows_;
  std::map<int, std::size_t> exchanges_;  // index of the task, by step
};

/// Decides where the blocks of a plan put their results, and adds the buffers and reductions that
/// combine results into their targets. Tasks are in their final order. Blocks name the output
/// buffer of their target. They stand in groups of one target and the same heads; each group ends
/// with its completion, a reduction of no parts into all rows of the target.
///
/// A result that alone covers the target is written there directly if dtypes permit, unless sinks
/// or an unnormalised output ask for a reduction.
/// Otherwise partial results wait in buffers until the last block of the group is done; then they
/// are reduced together and rounded once. If `input.options.result_bytes` cannot hold them all,
/// those so far are folded into one in float32.
void place_results(const PlanInput& input, RankPlan& plan);

/// Of the LSE of partial results.
[[nodiscard]] DType partial_lse_dtype(const PlanInput& input);
/// Of one reduction, the sinks not counted.
[[nodiscard]] int most_parts(const AttentionProblem& problem);

/// Adds to every task what it waits for in other queues, derived from the buffers that tasks read
/// and write.
void add_dependencies(RankPlan& plan);

}  // namespace annulus::ring
