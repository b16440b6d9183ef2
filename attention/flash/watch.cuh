#pragma once

#include <type_traits>

#include "flash/hopper/barrier.cuh"
#include "flash/shared.cuh"

namespace annulus::flash {

/// The work of the watching warps. A hidden value has weight 0, but 0 · NaN is NaN. So these warps
/// inspect values that some row of a tile must not see; if one is not finite, the consumers leave
/// the item to repair(), which never reads hidden values.
template <class Shape>
__device__ __forceinline__ void watch(const Arguments& a, Shared<Shape>& shared) {
  using Element = typename Shape::Element;
  constexpr bool kHalf = std::is_same_v<Element, __half>;
  constexpr std::uint32_t kExponents = kHalf ? 0x7C007C00 : 0x7F807F80;
  constexpr std::uint32_t kLowestBits = kHalf ? 0x04000400 : 0x00800080;
  constexpr std::uint32_t kSigns = 0x80008000;
  constexpr int kThreads = 32 * Shape::kWatchers;
  constexpr int kVectors = Shared<Shape>::kValueElements / 8;

  const int thread = static_cast<int>(threadIdx.x) - 64;
  const bool any_tile_hides = a.scores.bias.data != nullptr || a.scores.mask.data != nullptr;
  RingPosition<Shared<Shape>::kItems> item_at;
  RingPosition<Shape::kStages> value_at;
  for (;; item_at.next()) {
    shared.item_full[item_at.slot()].wait(item_at.parity());
    const Item& item = shared.item[item_at.slot()];
    if (item.index < 0) break;
    std::uint32_t sums = 0;  // a sign bit where an exponent was all ones
    for (std::int32_t s = 0; s < item.tile.segments; ++s) {
      const KeySegment* segment =
          s < Item::kInlineSegments ? &item.segments[s] : &a.segments[item.tile.first_segment + s];
      const bool hides = any_tile_hides || (segment->flags & KeySegment::kHidesValues) != 0;
      for (std::int32_t t = segment->tiles; t > 0; --t) {
        shared.value_full[value_at.slot()].wait(value_at.parity());
        if (hides) {
          const uint4* values = reinterpret_cast<const uint4*>(shared.value[value_at.slot()]);
#pragma unroll 4
          for (int i = thread; i < kVectors; i += kThreads) {
            const uint4 v = values[i];
            sums |= ((v.x & kExponents) + kLowestBits) | ((v.y & kExponents) + kLowestBits) |
                    ((v.z & kExponents) + kLowestBits) | ((v.w & kExponents) + kLowestBits);
          }
        }
        __syncwarp();
        if (thread % 32 == 0) shared.value_empty[value_at.slot()].arrive();
        value_at.next();
      }
    }
    const bool special = __any_sync(0xffffffff, (sums & kSigns) != 0);
    if (thread % 32 == 0) {
      if (special && atomicExch(&shared.left_to_repair[item_at.slot()], 1) == 0) {
        a.repair[1 + atomicAdd(a.repair, 1)] = item.index;
      }
      shared.verdict[item_at.slot()].arrive();
      shared.item_empty[item_at.slot()].arrive();
    }
  }
}

}  // namespace annulus::flash
