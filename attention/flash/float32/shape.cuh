#pragma once

#include "flash/item.cuh"

namespace annulus::flash::float32 {

inline constexpr int kRows = 64;     ///< of a query tile
inline constexpr int kColumns = 64;  ///< of a key tile
inline constexpr int kThreads = 128;

/// A thread's part of the scores, and of every 64 value dimensions: 8 rows by 4 columns. The 16
/// threads that share rows are every other lane of a warp.
inline constexpr int kOwnRows = 8;
inline constexpr int kOwnColumns = 4;

/// Thread blocks that share a multiprocessor.
template <int kDims>
inline constexpr int kBlocks = kDims <= 64    ? 3
                               : kDims <= 128 ? 2
                                              : 1;

/// Shared memory of a thread block for head dimensions up to kDims. Each group of kOwnRows rows
/// begins at another bank than the one before, since a warp reads two of them at a time.
template <int kDims>
struct Shared {
  static constexpr int kQueryShift = 4;
  static constexpr int kWeightShift = 16;  ///< they are also written, 64 bytes at a time
  static constexpr int kGroups = kRows / kOwnRows;

  alignas(16) float query[kRows * kDims + kGroups * kQueryShift];
  alignas(16) float key[kColumns * kDims];
  alignas(16) float value[kColumns * kDims];
  alignas(16) float weights[kRows * kColumns + kGroups * kWeightShift];
  Item item;

  [[nodiscard]] __device__ __forceinline__ float* query_at(unsigned row) {
    return query + row * kDims + row / kOwnRows * kQueryShift;
  }
  [[nodiscard]] __device__ __forceinline__ float* weights_at(unsigned row) {
    return weights + row * kColumns + row / kOwnRows * kWeightShift;
  }
  /// Four dimensions of a key. They trade places inside 32, so that threads read the same
  /// dimensions of different columns from different banks.
  [[nodiscard]] __device__ __forceinline__ float* key_at(unsigned column, unsigned quad) {
    return key + column * kDims + 4 * (quad ^ column / kOwnColumns % 8);
  }
};

/// The shared memory that a block may take, of the 228 KiB of a multiprocessor and 1 KiB less for
/// each.
template <int kDims>
inline constexpr int kMaximumShared = 228 * 1024 / kBlocks<kDims> - 1024;

}  // namespace annulus::flash::float32
