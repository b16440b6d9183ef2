#pragma once

#include <deque>
#include <vector>

#include "schedules/backward/replicas.hpp"
#include "schedules/building/task_builder.hpp"

namespace annulus::ring {

/// Buffers of rows for the backward pass, and of the rows' gradients, which blocks add to.
struct BackwardRows {
  RowBuffers operands;
  int grad_output = -1, lse = -1, delta = -1;
  int grad_query = -1;  ///< −1: not computed
  int grad_bias = -1;   ///< −1: not wanted
};

/// Buffers to which blocks add the gradients of columns, with the same tokens as the columns; −1
/// where these gradients are not computed.
struct ColumnGradients {
  int key = -1, value = -1;
};

/// Fills a RankPlan of the backward pass. A schedule says which blocks are computed in which step,
/// into which buffers their gradients go, and how these buffers are sent and added up. Gradients
/// are float32 (float64 in a float64 problem) until they are complete, and are then rounded once.
///
/// A buffer of gradients is zeroed before the first task that adds to it or reads it.
class BackwardBuilder : public TaskBuilder {
 public:
  /// The rows of the caller's tensors: see add_rows().
  static constexpr int kOwnRows = 0;

  /// Starts a plan whose buffers are the caller's tensors, and computes delta of the rank's own
  /// rows in step 0.
  explicit BackwardBuilder(const RankContext& context);

  /// The dtype of gradients that are added up or sent.
  [[nodiscard]] DType gradient_dtype() const;
  /// The dtype of parts that go straight to the owners of the columns.
  [[nodiscard]] DType wire_dtype() const;
  /// The dtype of complete gradients: the problem's if the caller's are overwritten.
  [[nodiscard]] DType complete_dtype() const;
  [[nodiscard]] const BackwardRows& own_backward_rows() const { return rows_.front().buffers; }

  /// Index of the rows in these buffers, at these positions.
  int add_rows(const BackwardRows& buffers, const PositionRanges& positions);
  /// Buffers for gradients of other ranks' columns, to be sent to them.
  ColumnGradients add_column_gradients(LocalRange tokens, HeadRange kv_heads, int reuses = -1);
  /// A buffer to receive gradients of the rank's own columns straight from another rank.
  int add_wire_gradients(LocalRange tokens, HeadRange kv_heads, int reuses = -1);
  /// The buffer to send gradients from, straight to the owners: this one, or a copy that is rounded
  /// in this step. `reuses`: an earlier copy whose memory it takes over.
  int for_wire(int step, int buffer, int reuses = -1);
  /// True if other ranks have gradients of the same rows, or of the same columns.
  [[nodiscard]] bool has_row_replicas() const noexcept { return row_replicas_.several(); }
  [[nodiscard]] bool has_column_replicas() const noexcept { return column_replicas_.several(); }
  /// The buffers for gradients of the rank's own columns.
  [[nodiscard]] const ColumnGradients& own_columns_gradients() const { return own_columns_; }

  /// Computes the blocks of the rows that see any of these columns, for these query heads: the
  /// gradients of the sides that have buffers.
  void compute(int step, int rows, HeadRange heads, const PlacedColumns& columns,
               const ColumnGradients& gradients);
  /// into := the sum of the parts, in their order; `into` may be the first of them.
  void sum(int step, std::vector<Region> parts, const Region& into);
  /// Adds a part of the gradients of these columns to `into`.
  void add_columns(int step, const Region& part, LocalRange columns, const ColumnGradients& into);
  /// The same for several runs of columns that are side by side in a buffer, from its first token
  /// on.
  void add_columns(int step, int buffer, const std::vector<LocalRange>& runs,
                   const ColumnGradients& into);
  /// True if the gradient of the bias is wanted and the bias has rows, which go with the queries.
  /// Without rows, the gradient stays where it is computed and is summed over the ranks.
  [[nodiscard]] bool bias_moves() const;
  /// Adds gradients of the bias of some of the rank's own rows.
  void add_to_own_bias(int step, const Region& part, LocalRange own_rows);
  /// To be called when no later step adds to them: sum the gradients of the rank's own rows, or
  /// columns, over the ranks that hold the same ones, and put them into the caller's tensors.
  void finish_rows(int step);
  void finish_columns(int step);
  /// The same for the gradient of the bias, if it is wanted. finish_rows() includes it.
  void finish_bias(int step);
  /// Puts complete gradients of some of the rank's own tokens into the caller's tensor.
  void put(int step, Content content, const Region& complete, LocalRange own_tokens);

  /// Returns the complete plan.
  [[nodiscard]] RankPlan finish();

 private:
  struct Rows {
    BackwardRows buffers;
    BlockFinder finder;
  };

  /// A buffer with a sum over ranks, and the step from which on it is there.
  struct Total {
    int buffer;
    int step;
  };
  Total total_of(int step, const Replicas& replicas, int mine, const std::vector<Content>& contents,
                 DType complete);
  void add_up(int step, const Replicas& replicas, const std::vector<int>& partial,
              const std::vector<Content>& contents, DType complete);
  void add_sink_gradient(int delta);

  std::deque<Rows> rows_;
  Replicas row_replicas_, column_replicas_, bias_replicas_;
  ColumnGradients own_columns_;
};

/// Makes every buffer of gradients start from zeros, by a task that clears it or by overwriting;
/// the caller's too, even if nothing is added to them. `adds`: the caller's start from their
/// present values.
void begin_gradients(RankPlan& plan, bool adds);

}  // namespace annulus::ring
