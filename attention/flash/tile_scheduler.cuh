#pragma once

#include "flash/shared.cuh"

namespace annulus::flash {

/// The work of one thread: it takes work items and describes them to the other threads, one item
/// ahead of the consumers. Taking and describing an item needs several dependent accesses to global
/// memory, for which short items leave the producer no time between two copies.
template <class Shape>
__device__ __forceinline__ void schedule_tiles(const Arguments& a, Shared<Shape>& shared) {
  RingPosition<Shared<Shape>::kItems> item_at;
  const std::int32_t items = item_count(a);
  std::int32_t index = static_cast<std::int32_t>(blockIdx.x);
  for (;; item_at.next()) {
    shared.item_empty[item_at.slot()].wait(item_at.parity() ^ 1);
    // Take an item only once a slot is free: an item that waits here is lost to idle blocks.
    if (index < 0) index = atomicAdd(a.counters, 1) + static_cast<std::int32_t>(gridDim.x);
    Item& item = shared.item[item_at.slot()];
    if (index >= items) break;
    describe_item(a, index, item);
    shared.left_to_repair[item_at.slot()] = 0;
    shared.item_full[item_at.slot()].arrive();
    index = -1;
  }
  shared.item[item_at.slot()].index = -1;
  shared.item_full[item_at.slot()].arrive();

  // Once all blocks are here, all have taken their last item; the last block prepares the next
  // launch.
  __threadfence();
  if (atomicAdd(a.counters + 1, 1) == static_cast<std::int32_t>(gridDim.x) - 1) {
    a.counters[0] = 0;
    a.counters[1] = 0;
  }
}

}  // namespace annulus::flash
