#pragma once

#include "flash/arguments.hpp"

namespace annulus::flash {

/// A work item: a query tile of one head of one batch, and the keys that it meets.
struct Item {
  static constexpr int kInlineSegments = 4;
  std::int32_t index;  ///< −1: no more work
  std::int32_t batch;
  std::int32_t head;
  QueryTile tile;
  KeySegment segments[kInlineSegments];  ///< the first ones; the others are in global memory
};

/// Number of work items of a call: a query tile of one head of one batch each.
__device__ __forceinline__ std::int32_t item_count(const Arguments& a) {
  return a.tiles_per_list * a.batches * a.heads;
}

/// Item `index` in the order of work: by sections of heads whose keys and values fit in L2
/// together, inside a section from the longest tile to the shortest, the heads of a tile side by
/// side.
__device__ __forceinline__ void describe_item(const Arguments& a, std::int32_t index, Item& item) {
  const std::int32_t all_heads = a.batches * a.heads;
  const std::int32_t section = index / (a.tiles_per_list * a.section_heads);
  const std::int32_t first_head = section * a.section_heads;
  const std::int32_t in_section = index - a.tiles_per_list * first_head;
  const std::int32_t heads = min(a.section_heads, all_heads - first_head);
  const std::int32_t rank = in_section / heads;
  const std::int32_t head = first_head + in_section - rank * heads;
  const std::int32_t batch = head / a.heads;
  item.index = index;
  item.batch = batch;
  item.head = head - batch * a.heads;
  const std::int32_t of_batch = a.batch_has_list ? batch : 0;
  const std::int32_t list = a.head_has_list ? of_batch * a.heads + item.head : of_batch;
  item.tile = a.tiles[list * a.tiles_per_list + rank];
  const KeySegment* segments = a.segments + item.tile.first_segment;
  for (int i = 0; i < min(item.tile.segments, Item::kInlineSegments); ++i) {
    item.segments[i] = segments[i];
  }
}

}  // namespace annulus::flash
