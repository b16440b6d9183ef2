#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include <annulus/ring/plan.hpp>

#include "schedules/building/task_builder.hpp"

namespace annulus::ring {

/// Fills a RankPlan of the forward pass. A schedule says what is copied, exchanged and computed in
/// which step. The buffers of results, the reductions and the dependencies follow from that.
class PlanBuilder : public TaskBuilder {
 public:
  /// The rows of the caller's tensors: see add_rows().
  static constexpr int kOwnRows = 0;

  /// Starts a plan whose buffers are the caller's tensors.
  explicit PlanBuilder(const RankContext& context);

  using TaskBuilder::copy;
  using TaskBuilder::receive;
  using TaskBuilder::send;

  /// Copies outputs, LSEs and maxima of all heads, from row `begin` of `from` to `rows` of `to`.
  void copy(int step, const Result& from, LocalPosition begin, const Result& to, LocalRange rows);

  /// Buffers for results that other ranks get: complete and rounded, or partial in the precision of
  /// partial results. `reuses`: results whose memory they take over.
  [[nodiscard]] Result add_complete_results(LocalRange rows, HeadRange heads,
                                            const Result* reuses = nullptr);
  [[nodiscard]] Result add_partial_results(LocalRange rows, HeadRange heads,
                                           const Result* reuses = nullptr);
  /// The caller's output, LSE and maximum, for some heads.
  [[nodiscard]] Result own_results(HeadRange heads) const;

  /// Index of the rows in these buffers, at these positions, whose results go to all rows and heads
  /// of `results`. `complete`: the results are not just partial.
  int add_rows(const RowBuffers& buffers, const PositionRanges& positions, const Result& results,
               bool complete);

  /// Computes the rows that see any of these columns, for these query heads.
  void compute(int step, int rows, HeadRange heads, const PlacedColumns& columns);
  /// The same for columns in one buffer that earlier exchanges fill from its end to its beginning.
  /// Prefers kernels that can await columns, which begin at once.
  void compute_awaiting(int step, int rows, HeadRange heads, const PlacedColumns& columns);
  /// Completes the results of these rows and heads. To be called after their last block, even if
  /// there is none; no other rows or heads may be computed in between.
  void complete(int step, int rows, HeadRange heads);
  /// Combines results. `complete`: the sum is not just partial again.
  void reduce(int step, std::vector<Result> parts, const Result& into, bool complete);

  /// Sends results: outputs, LSEs and maxima, each for all runs of rows.
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
/// or an unnormalised output ask for a reduction. Otherwise partial results wait in buffers until
/// the last block of the group is done; then they are reduced together and rounded once. If
/// `input.options.result_bytes` cannot hold all, the results so far are folded into one in float32.
void place_results(const PlanInput& input, RankPlan& plan);

/// The dtype of partial results' LSE.
[[nodiscard]] DType partial_lse_dtype(const PlanInput& input);
/// The most parts of one reduction, the sinks not counted.
[[nodiscard]] int most_parts(const AttentionProblem& problem);

/// Adds to every task what it waits for in other queues, derived from the buffers that tasks read
/// and write.
void add_dependencies(RankPlan& plan);

}  // namespace annulus::ring
