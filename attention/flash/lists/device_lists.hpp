#pragma once

#include <cuda_runtime_api.h>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>

#include "flash/lists/list_plan.hpp"

namespace annulus::flash {

/// The work lists of a block, made by a device for its kernels: see ListPlan.
class DeviceLists {
 public:
  /// Allocates on the current device, which must be that of `memory`, and copies the input of the
  /// lists there before it returns.
  DeviceLists(const ListPlan& plan, MemoryPool& memory);

  /// Enqueues two kernels and allocates nothing, so that it can be captured into a graph. The lists
  /// are ready in the order of `stream`; making them again gives the same lists.
  void make(cudaStream_t stream) const { make(stream, {}, 0); }
  /// The same with other lengths and offsets, of the block's batches from `first_batch` on. The
  /// plan's mask has such parts itself.
  void make(cudaStream_t stream, const CallArgumentArrays& called, std::int64_t first_batch) const;

  /// [batches][heads] of the plan: tiles_per_list() query tiles each.
  [[nodiscard]] const QueryTile* tiles() const { return output_.tiles; }
  [[nodiscard]] const KeySegment* segments() const { return output_.segments; }
  /// Null unless masked tiles need them.
  [[nodiscard]] const RowKeys* row_keys() const { return output_.row_keys; }
  [[nodiscard]] const std::int32_t* row_ids() const { return output_.row_ids; }
  /// The ids of the last batch are followed by zeros for one tile, as a tile may reach beyond the
  /// last column.
  [[nodiscard]] const std::int32_t* column_ids() const { return output_.column_ids; }

 private:
  template <class T>
  [[nodiscard]] T* take(std::int64_t count, MemoryPool& memory);

  Tensor numbers_;
  Buffer blocks_;
  std::vector<Buffer> buffers_;
  ListInput input_;
  ListOutput output_;
};

}  // namespace annulus::flash
