#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/memory.hpp>

#include "native/amx_gradients.hpp"
#include "native/matrix_path.hpp"
#include "native/tile_visibility.hpp"
#include "native/tiles.hpp"

namespace annulus {

/// Neighbouring columns of one batch and key/value head.
struct ColumnTile {
  std::int64_t batch = 0;  ///< local
  std::int64_t kv_head = 0;
  std::int64_t begin = 0;  ///< local position of columns.start
  PositionRange columns;
};

/// Largest sizes of tiles. Two matrices of rows × columns, and the rows and columns of all
/// operands, fit a level-2 cache.
inline constexpr std::int64_t kGradientRows = 256;
inline constexpr std::int64_t kGradientColumns = 256;

/// Computes the gradients of one column tile after the other, from one row tile after the other, in
/// a workspace of its own (docs/semantics.md §1, "Backward"). Heads are stacked as in a TileKernel.
/// Logits and their gradients are computed once. A tile whose entries AMX cannot multiply goes to
/// sgemm.
class TileGradients {
 public:
  /// Everything referred to must outlive the object; `forward` is forward_of(block).
  TileGradients(const AttentionProblem& problem, const BackwardBlock& block,
                const AttentionBlock& forward, const Gradients& gradients, MatrixPath path,
                MemoryPool& memory);

  /// Begins a column tile.
  void start(const ColumnTile& columns);
  /// Takes in a row tile of the same batch and key/value head, with up to kGradientRows stacked
  /// rows. Returns false if it sees none of the columns.
  [[nodiscard]] bool take(const RowTile& tile, const HeadTile& heads);
  /// Adds the gradients of the row tile's queries and biases.
  void add_rows();
  /// Adds the gradients of the column tile's keys and values.
  void add_columns();

 private:
  /// Pairs of the present tiles that may see each other: rows [row, row + rows) of the row tile,
  /// and columns [column, column + columns.length) of the column tile.
  struct Pairs {
    RowTile tile;
    HeadTile heads;
    std::int64_t row = 0;
    std::int64_t rows = 0;
    std::int64_t column = 0;
    PositionRange columns;
    bool full = false;   // the mask shows every pair
    bool shown = false;  // the dense mask shows every pair
    [[nodiscard]] std::int64_t stacked() const { return rows * heads.count; }
    // Local indices of a stacked row.
    [[nodiscard]] std::int64_t head(std::int64_t index) const {
      return heads.begin + index % heads.count;
    }
    [[nodiscard]] std::int64_t local_row(std::int64_t index) const {
      return tile.begin.value() + row + index / heads.count;
    }
    [[nodiscard]] GlobalPosition position(std::int64_t index) const {
      return tile.rows.at(row + index / heads.count);
    }
  };

  [[nodiscard]] bool find_pairs(const RowTile& tile, const HeadTile& heads);
  void load_rows();
  void multiply_operands();
  /// Turns the logits of rows and the products dO Vᵀ into weights and gradients.
  void differentiate();
  void differentiate_row(std::int64_t index, const RowSight& sight,
                         const std::vector<LocalRange>& hidden);
  void multiply_gradients();
  /// Does the work of both functions above, one by one for the pairs that see each other: a product
  /// with the 0 of a hidden pair would spread NaN and infinities.
  void take_pair_by_pair();
  [[nodiscard]] bool sees(std::int64_t index, std::int64_t column) const;
  void add_bias_gradients() const;

  [[nodiscard]] bool wants_query() const { return gradients_.query.shape().rank() > 0; }
  [[nodiscard]] bool wants_key() const { return gradients_.key.shape().rank() > 0; }
  [[nodiscard]] bool wants_value() const { return gradients_.value.shape().rank() > 0; }
  [[nodiscard]] bool wants_bias() const { return gradients_.bias.shape().rank() > 0; }

  const AttentionProblem& problem_;
  const BackwardBlock& block_;
  const Gradients& gradients_;
  const TileVisibility visibility_;
  const std::int64_t dim_;
  const std::int64_t value_dim_;
  const float scale_;
  std::optional<AmxGradients> amx_;  // set if the path is amx
  Buffer workspace_;
  float* keys_ = nullptr;         // [columns, D]
  float* values_ = nullptr;       // [columns, Dv]
  float* grad_keys_ = nullptr;    // as keys
  float* grad_values_ = nullptr;  // as values
  float* queries_ = nullptr;      // [rows, D]; like all below, only for rows of the pairs
  float* grad_outputs_ = nullptr;
  float* grad_queries_ = nullptr;
  float* weights_ = nullptr;      // logits first; [rows, kGradientStride]
  float* grads_ = nullptr;        // dO Vᵀ first; likewise
  float* grad_logits_ = nullptr;  // likewise, if the gradient of a bias is wanted
  float* slopes_ = nullptr;       // of one row at a time
  float* keep_ = nullptr;         // likewise
  std::vector<float> lse_, delta_;
  ColumnTile columns_;
  Pairs pairs_;
  bool amx_columns_ = false;     // AMX can multiply the keys and values …
  bool amx_rows_ = false;        // … and queries and dO too
  bool finite_columns_ = false;  // all keys and values are
  bool finite_rows_ = false;     // so are queries, dO, LSE and delta, except in empty rows
  bool empty_rows_ = false;      // some rows see no key: their LSE is −∞
};

}  // namespace annulus
