#pragma once

#include <vector>

#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>

#include "flash/backward/tile_mask.hpp"
#include "flash/lists/list_plan.hpp"

namespace annulus::flash::backward {

/// The TileMask of a block, made by a device for its kernels.
class TileLists {
 public:
  /// On the current device, which must be that of `memory`; the lists are ready when it returns.
  /// Positions must lie below 2^28. `row_positions`, `key_ranks`: the kernels read them.
  TileLists(const Mask& mask, const BatchesAndHeads& of, const PositionRanges& rows,
            const PositionRanges& columns, int tile_rows, int tile_columns, bool row_positions,
            bool key_ranks, MemoryPool& memory);

  [[nodiscard]] const TileMask& mask() const { return mask_; }
  /// The rows of a head that its key tiles read at about the same time: from the first to the last
  /// row that sees some of a key tile, on average. Up to twice as many where key tiles skip rows,
  /// since they then drift apart.
  [[nodiscard]] double rows_at_a_time() const { return rows_at_a_time_; }
  /// The number of key tiles that a query tile sees, at most. Without key_ranks, 0.
  [[nodiscard]] std::int32_t most_keys() const { return most_keys_; }

 private:
  template <class T>
  [[nodiscard]] T* take(std::int64_t count, MemoryPool& memory);
  void order_by_work(const std::vector<TileWork>& work, double mean, std::int32_t most,
                     MemoryPool& memory);

  TileMask mask_;
  double rows_at_a_time_ = 1;
  std::int32_t most_keys_ = 0;
  std::vector<Buffer> buffers_;
};

}  // namespace annulus::flash::backward
