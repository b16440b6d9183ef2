#pragma once

#include "flash/float32/products.cuh"
#include "flash/item.cuh"

namespace annulus::flash::float32 {

inline constexpr int kThreads = 128;

/// Thread blocks that share a multiprocessor.
template <int kDims>
inline constexpr int kBlocks = kDims <= 64    ? 3
                               : kDims <= 128 ? 2
                                              : 1;

/// Shared memory of a thread block for head dimensions up to kDims.
template <int kDims>
struct Shared {
  OwnRowsTile<kDims> query;
  OtherTile<kDims> key;
  alignas(16) float value[kTileRows * kDims];
  WeightsTile weights;
  Item item;
};

/// The shared memory that a block may take: its share of a multiprocessor's 228 KiB, less 1 KiB.
template <int kDims>
inline constexpr int kMaximumShared = 228 * 1024 / kBlocks<kDims> - 1024;

}  // namespace annulus::flash::float32
