#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>

#include "native/matrix_path.hpp"
#include "native/row_softmax.hpp"

namespace annulus {

/// The most columns that a tile has.
inline constexpr std::int64_t kTileColumns = 512;
/// The most rows, (query position, head) pairs, that a tile has. With sgemm, logits and the tiles
/// of key and value fit a level-2 cache, and the products run near the core's peak. AMX needs more
/// rows to amortise the packing of keys and values.
[[nodiscard]] constexpr std::int64_t most_tile_rows(MatrixPath path) {
  return path == MatrixPath::amx ? 512 : 256;
}

/// Rows of a key or value tensor [b,s,k,D] of one batch and head.
struct TensorRows {
  const ConstTensorView* tensor = nullptr;
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;

  [[nodiscard]] const void* row(std::int64_t i) const {
    return tensor->address({batch, begin + i, head});
  }
};

/// The part of a tile that is computed at once: stacked rows [begin, end) by the columns that any
/// of these rows sees.
struct Strip {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t first_column = 0;  ///< a multiple of kRowAlignment
  std::int64_t columns = 0;
  [[nodiscard]] std::int64_t rows() const { return end - begin; }
};

/// The two matrix products of a tile, with workspace for their operands; for one thread. A tile is
/// computed strip by strip: first the logits, which the caller turns into weights, then the weights
/// times the values.
class TileProduct {
 public:
  virtual ~TileProduct() = default;
  TileProduct() = default;
  TileProduct(const TileProduct&) = delete;
  TileProduct& operator=(const TileProduct&) = delete;

  [[nodiscard]] virtual MatrixPath path() const = 0;
  /// The most rows that a strip has. If pairs are `hidden`, short strips compute fewer of them.
  [[nodiscard]] virtual std::int64_t strip_rows(bool hidden) const = 0;
  /// The positive factor that logits() still lack.
  [[nodiscard]] virtual float factor() const = 0;

  /// Begins a tile of `rows` rows, with an accumulator of zeros.
  virtual void start(std::int64_t rows) = 0;
  /// Sets row `index` of the tile to `query`, D values of the problem's dtype.
  virtual void set_query(std::int64_t index, const void* query) = 0;
  /// Loads the keys of a tile. Every query must have been set.
  virtual void load_keys(const TensorRows& keys) = 0;
  /// Loads the values of a tile. `hidden`: some may be hidden from some of the rows.
  virtual void load_values(const TensorRows& values, bool hidden) = 0;

  virtual void multiply_keys(Strip strip) = 0;
  /// The logits of a row of the strip, from the strip's first column on, and where to write their
  /// weights. Both are padded to whole vectors (kRowAlignment).
  [[nodiscard]] virtual float* logits(std::int64_t row) = 0;
  [[nodiscard]] virtual WeightRow weights(std::int64_t row) = 0;
  /// The weight of a row and a column of the tile.
  [[nodiscard]] virtual float weight(std::int64_t row, std::int64_t column) const = 0;
  /// Adds weights · values to the accumulator.
  virtual void multiply_values(Strip strip) = 0;

  /// Row `index` of the tile's accumulator [rows, Dv].
  [[nodiscard]] virtual float* accumulator(std::int64_t index) = 0;

  /// True if the product treats a value as 0: one that is not finite (since 0 · NaN is NaN, also in
  /// rows that do not see the key), or one that it cannot multiply exactly.
  [[nodiscard]] virtual bool leaves_out(float value) const = 0;
  /// The columns with values that were left out.
  [[nodiscard]] const std::vector<std::int64_t>& poisoned() const noexcept { return poisoned_; }

 protected:
  std::vector<std::int64_t> poisoned_;
};

struct TileProductSizes {
  DType dtype = DType::float32;
  std::int64_t rows = 0;     ///< of a tile, at most
  std::int64_t columns = 0;  ///< likewise
  std::int64_t dim = 0;
  std::int64_t value_dim = 0;
  double scale = 1;
};

[[nodiscard]] std::unique_ptr<TileProduct> make_tile_product(MatrixPath path,
                                                             const TileProductSizes& sizes,
                                                             MemoryPool& memory);

}  // namespace annulus
