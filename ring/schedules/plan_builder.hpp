#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include <annulus/ring/plan.hpp>

#include "schedules/task_builder.hpp"

namespace annulus::ring {

/// Fills a RankPlan of the forward pass. A schedule says what is copied, exchanged and computed in
/// which step. The rest follows from that: where results lie, how they are reduced, and the
/// dependencies.
class PlanBuilder : public TaskBuilder {
 public:
  /// The rows of the caller's tensors: see add_rows().
  static constexpr int kOwnRows = 0;

  /// Starts a plan whose buffers are the caller's tensors.
  explicit PlanBuilder(const RankContext& context);

  using TaskBuilder::copy;
  using TaskBuilder::receive;
  using TaskBuilder::send;

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

  /// Index of rows that lie in these buffers, at these positions, and whose results go to
  /// `results`: all its rows and heads. `complete`: these are not only parts of results.
  int add_rows(const RowBuffers& buffers, const PositionRanges& positions, const Result& results,
               bool complete);

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

  std::deque<Rows> rows_;
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

/// The dtype of partial results' LSE.
[[nodiscard]] DType partial_lse_dtype(const PlanInput& input);
/// The most parts of one reduction, the sinks not counted.
[[nodiscard]] int most_parts(const AttentionProblem& problem);

/// Adds to every task what it waits for in other queues, derived from the buffers that tasks read
/// and write.
void add_dependencies(RankPlan& plan);

}  // namespace annulus::ring
