#pragma once

#include "flash/hopper/barrier.cuh"
#include "flash/item.cuh"

namespace annulus::flash {

/// Shared memory of a thread block.
template <class Shape>
struct Shared {
  using Element = typename Shape::Element;
  static constexpr int kItems = 2;
  static constexpr int kQueryElements = 64 * Shape::kHeadDim;
  static constexpr int kKeyElements = Shape::kColumns * Shape::kHeadDim;
  static constexpr int kValueElements = Shape::kColumns * Shape::kValueDim;

  alignas(1024) Element query[Shape::kQueryStages][Shape::kConsumers][kQueryElements];
  alignas(1024) Element key[Shape::kStages][kKeyElements];
  alignas(1024) Element value[Shape::kStages][kValueElements];

  hopper::Barrier query_full[Shape::kQueryStages][Shape::kConsumers];
  hopper::Barrier query_empty[Shape::kQueryStages][Shape::kConsumers];
  hopper::Barrier key_full[Shape::kStages], key_empty[Shape::kStages];
  hopper::Barrier value_full[Shape::kStages], value_empty[Shape::kStages];
  hopper::Barrier item_full[kItems], item_empty[kItems];
  hopper::Barrier verdict[kItems];  ///< left_to_repair is known
  Item item[kItems];
  std::int32_t left_to_repair[kItems];

  /// By one thread, before any other touches the barriers.
  __device__ void init_barriers() {
    constexpr int kWarps = 4 * Shape::kConsumers;
    for (int i = 0; i < Shape::kQueryStages; ++i) {
      for (int group = 0; group < Shape::kConsumers; ++group) {
        query_full[i][group].init(1);
        query_empty[i][group].init(4);
      }
    }
    for (int i = 0; i < Shape::kStages; ++i) {
      key_full[i].init(1);
      key_empty[i].init(kWarps);
      value_full[i].init(1);
      value_empty[i].init(kWarps + Shape::kWatchers);
    }
    for (int i = 0; i < kItems; ++i) {
      item_full[i].init(1);
      item_empty[i].init(kWarps + Shape::kWatchers + 1);
      verdict[i].init(Shape::kWatchers);
    }
    hopper::fence_barrier_init();
  }
};

/// Counts through a ring of kSlots slots: which one it is at, and the parity of its phase.
template <int kSlots>
struct RingPosition {
  std::uint32_t count = 0;
  [[nodiscard]] __device__ __forceinline__ std::uint32_t slot() const { return count % kSlots; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t parity() const {
    return count / kSlots % 2;
  }
  __device__ __forceinline__ void next() { ++count; }
  [[nodiscard]] __device__ __forceinline__ RingPosition before() const { return {count - 1}; }
};

}  // namespace annulus::flash
