#include "flash/lists/device_lists.hpp"

#include <algorithm>

#include <annulus/core/cuda_stream.hpp>

#include "cuda/upload.hpp"
#include "flash/lists/make_lists.hpp"

namespace annulus::flash {

DeviceLists::DeviceLists(const ListPlan& plan, MemoryPool& memory) {
  const std::int64_t batches = plan.batches();
  const ListInput known = plan.input(nullptr, nullptr);
  output_.tiles = take<QueryTile>(plan.tiles(), memory);
  output_.segments = take<KeySegment>(plan.most_segments(), memory);
  output_.key_tiles = take<std::int32_t>(plan.tiles(), memory);
  output_.places = take<TilePlace>(plan.tiles(), memory);
  output_.block_segments = take<std::int32_t>(list_blocks(plan.tiles()), memory);
  if (plan.needs_row_keys()) output_.row_keys = take<RowKeys>(batches * known.rows, memory);
  if (plan.asked() == Asked::ids) {
    output_.row_ids = take<std::int32_t>(batches * known.rows, memory);
    output_.column_ids = take<std::int32_t>(batches * known.columns + known.tile_columns, memory);
    check_cuda(cudaMemsetAsync(output_.column_ids + batches * known.columns, 0,
                               sizeof(std::int32_t) * static_cast<std::size_t>(known.tile_columns),
                               nullptr),
               "cudaMemsetAsync");
  }
  numbers_ = upload(plan.numbers(), memory);
  const std::span<const std::uint64_t> blocks = plan.blocks();
  blocks_ = upload({reinterpret_cast<const std::int64_t*>(blocks.data()), blocks.size()}, memory);
  input_ = plan.input(static_cast<const std::int32_t*>(numbers_.view().data()),
                      static_cast<const std::uint64_t*>(blocks_.data()));
}

template <class T>
T* DeviceLists::take(std::int64_t count, MemoryPool& memory) {
  const auto entries = static_cast<std::size_t>(std::max<std::int64_t>(count, 1));
  buffers_.push_back(memory.allocate(entries * sizeof(T), "work lists"));
  return static_cast<T*>(buffers_.back().data());
}

void DeviceLists::make(cudaStream_t stream, const CallArgumentArrays& called,
                       std::int64_t first_batch) const {
  check_cuda(launch_lists(with_arguments(input_, called, first_batch), output_, stream),
             "launching the kernels that make work lists");
}

}  // namespace annulus::flash
