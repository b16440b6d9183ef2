#pragma once

#include "flash/hopper/tma.cuh"
#include "flash/shared.cuh"

namespace annulus::flash {

/// Waits for columns that arrive while the kernel runs, the last ones first.
class Arrivals {
 public:
  __device__ __forceinline__ explicit Arrivals(const std::int32_t* arrived_from)
      : word_(arrived_from), from_(arrived_from == nullptr ? 0 : kNone) {}

  /// Returns once bulk copies can read this column and all later ones.
  __device__ __forceinline__ void await(std::int32_t column) {
    if (column >= from_) return;
    while (true) {
      asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(from_) : "l"(word_) : "memory");
      if (column >= from_) break;
      __nanosleep(100);
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

 private:
  static constexpr std::int32_t kNone = 0x7fffffff;
  const std::int32_t* word_;
  std::int32_t from_;
};

/// The work of one thread: it keeps the rings of query, key and value tiles full.
template <class Shape>
__device__ __forceinline__ void produce(const Arguments& a, Shared<Shape>& shared) {
  using hopper::Cache;
  using hopper::copy_box;
  using Element = typename Shape::Element;
  hopper::prefetch_map(&a.query);
  hopper::prefetch_map(&a.key);
  hopper::prefetch_map(&a.value);

  RingPosition<Shared<Shape>::kItems> item_at;
  RingPosition<Shape::kStages> tile_at;
  RingPosition<Shape::kQueryStages> query_at;
  Arrivals arrivals(a.arrived_from);
  for (;; item_at.next()) {
    shared.item_full[item_at.slot()].wait(item_at.parity());
    const Item& item = shared.item[item_at.slot()];
    if (item.index < 0) break;
    if (item.tile.segments > 0) {
      const std::int32_t first_row = item.tile.first_row;
#pragma unroll
      for (int group = 0; group < Shape::kConsumers; ++group) {
        hopper::Barrier& full = shared.query_full[query_at.slot()][group];
        shared.query_empty[query_at.slot()][group].wait(query_at.parity() ^ 1);
        full.arrive_expecting(Shared<Shape>::kQueryElements * sizeof(Element));
#pragma unroll
        for (int dim = 0; dim < Shape::kHeadDim; dim += 64) {
          copy_box(shared.query[query_at.slot()][group] + 64 * dim, &a.query, full,
                   Cache::evict_first, dim, first_row + 64 * group, item.head, item.batch);
        }
      }
      query_at.next();
    }
    const std::int32_t kv_head = item.head / a.heads_per_kv_head;
    const std::int32_t batch = item.batch;
    for (std::int32_t s = 0; s < item.tile.segments; ++s) {
      const KeySegment* segment =
          s < Item::kInlineSegments ? &item.segments[s] : &a.segments[item.tile.first_segment + s];
      const std::int32_t first = segment->first_column;
      for (std::int32_t column = first + (segment->tiles - 1) * Shape::kColumns; column >= first;
           column -= Shape::kColumns) {
        const std::int32_t slot = tile_at.slot();
        shared.key_empty[slot].wait(tile_at.parity() ^ 1);
        arrivals.await(column);
        shared.key_full[slot].arrive_expecting(Shared<Shape>::kKeyElements * sizeof(Element));
#pragma unroll
        for (int dim = 0; dim < Shape::kHeadDim; dim += 64) {
          copy_box(shared.key[slot] + Shape::kColumns * dim, &a.key, shared.key_full[slot],
                   Cache::evict_last, dim, column, kv_head, batch);
        }
        shared.value_empty[slot].wait(tile_at.parity() ^ 1);
        shared.value_full[slot].arrive_expecting(Shared<Shape>::kValueElements * sizeof(Element));
#pragma unroll
        for (int dim = 0; dim < Shape::kValueDim; dim += 64) {
          copy_box(shared.value[slot] + Shape::kColumns * dim, &a.value, shared.value_full[slot],
                   Cache::evict_last, dim, column, kv_head, batch);
        }
        tile_at.next();
      }
    }
    shared.item_empty[item_at.slot()].arrive();
  }
}

}  // namespace annulus::flash
