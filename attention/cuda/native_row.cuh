#pragma once

#include <cstdint>

#include <annulus/core/vectors.cuh>

#include "cuda/native_block.hpp"

// The rows of the native kernels, forward and backward: they decide which pairs see each other.
namespace annulus::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffU;

/// The global position of a local index.
__device__ __forceinline__ std::int64_t position_of(const DeviceRange* ranges, int count,
                                                    std::int64_t local) {
  int r = 0;
  while (r + 1 < count && local >= ranges[r + 1].first) ++r;
  return ranges[r].start + (local - ranges[r].first) * ranges[r].stride;
}

/// A row of a query head, and the keys that it sees. Batch, head and row are local indices.
struct NativeRow {
  std::int64_t batch;     // global
  std::int64_t position;  // global
  std::int32_t segment;   // −1: there are none
  bool padding;           // it sees nothing
  KeySpans keys;          // by its position
  const std::int32_t* blocks;
  const float* bias;
  const std::uint8_t* mask;

  __device__ __forceinline__ NativeRow(const NativeBlock& a, std::int64_t b, std::int64_t head,
                                       std::int64_t row)
      : batch(a.first_batch + b),
        position(position_of(a.row_range, a.row_ranges, row)),
        segment(a.query_segments == nullptr ? -1
                                            : a.query_segments[batch * a.query_length + position]),
        padding((a.query_lengths != nullptr && position >= a.query_lengths[batch]) ||
                (a.query_segments != nullptr && segment < 0)),
        keys(padding ? KeySpans{} : keys_of(a)),
        blocks(a.blocks == nullptr ? nullptr
                                   : a.blocks + batch * a.block_strides[0] +
                                         (a.first_head + head) * a.block_strides[1] +
                                         position / a.query_block * a.block_strides[2]),
        bias(a.scores.bias.data == nullptr ? nullptr : a.scores.bias.row(b, head, row)),
        mask(a.scores.mask.data == nullptr ? nullptr : a.scores.mask.row(b, head, row)) {}

  /// Returns true if it sees the column of local index c and global position j, and then sets
  /// `added` to the bias.
  [[nodiscard]] __device__ __forceinline__ bool sees(const NativeBlock& a, std::int64_t c,
                                                     std::int64_t j, float& added) const {
    added = 0.0F;
    if (padding || !shown_by_mask(a, j)) return false;
    const std::int64_t key = a.scores.key_of(c, j);
    if (mask != nullptr && mask[key * a.scores.mask.strides[3]] == 0) return false;
    if (bias != nullptr) added = bias[key * a.scores.bias.strides[3]];
    return added != -INFINITY;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ KeySpans keys_of(const NativeBlock& a) const {
    PositionFrame frame = a.frame;
    if (a.offsets != nullptr) frame.offset = a.offsets[batch];
    if (a.prefixes != nullptr) frame.prefix = a.prefixes[batch];
    if (a.query_cu_seqlens != nullptr) {
      frame = frame_of_document(a.query_cu_seqlens, a.kv_cu_seqlens, segment, a.bottom_right,
                                frame.prefix);
    }
    return a.positions.rule(frame).keys_of(position);
  }
  [[nodiscard]] __device__ __forceinline__ bool shown_by_mask(const NativeBlock& a,
                                                              std::int64_t j) const {
    if (j >= keys.opening && (j < keys.begin || j >= keys.end)) return false;
    if (a.kv_lengths != nullptr && j >= a.kv_lengths[batch]) return false;
    if (blocks != nullptr && blocks[j / a.kv_block * a.block_strides[3]] == 0) return false;
    return a.kv_segments == nullptr || a.kv_segments[batch * a.kv_length + j] == segment;
  }
};

}  // namespace annulus::cuda
