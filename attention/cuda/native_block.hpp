#pragma once

#include <cstdint>

#include <annulus/attention/position_rule.hpp>

#include "cuda/dropout_arguments.hpp"
#include "cuda/score_arguments.hpp"

namespace annulus::cuda {

/// As PositionRange, for device code.
struct DeviceRange {
  std::int64_t start;
  std::int64_t length;
  std::int64_t stride;
  std::int64_t first;  ///< local index of its first entry
};

/// The rows and columns of one launch of a native kernel, forward or backward, in up to kMaxRanges
/// ranges each, and what they see of each other. Arrays are device memory unless they are part of
/// the struct; they travel by value. Rows are counted from the first one of the launch, columns
/// from that of the call.
struct NativeBlock {
  static constexpr int kMaxRanges = 24;

  const void* query;
  const void* key;
  const void* value;
  // Strides in elements.
  std::int64_t query_strides[3];  // b, t, n
  std::int64_t key_strides[3];    // b, s, k
  std::int64_t value_strides[3];  // b, s, k
  std::int64_t batch, rows, heads, heads_per_kv_head;
  int head_dim, value_dim;
  float scale;     // of q·k
  float soft_cap;  // 0: none
  DropoutArguments dropout;
  ScoreArguments scores;
  // Mask, in global positions.
  PositionParts positions;
  PositionFrame frame;                   // of all batches, except as below
  const std::int32_t* offsets;           // [B], null: that of the frame
  const std::int32_t* prefixes;          // [B], likewise
  const std::int32_t* query_cu_seqlens;  // of two packings, null: none; segments are documents
  const std::int32_t* kv_cu_seqlens;     // likewise
  bool bottom_right;                     // alignment of the documents
  const std::int32_t* query_lengths;     // [B], null: none
  const std::int32_t* kv_lengths;        // [B], null: none
  const std::int32_t* query_segments;    // [B,T], null: none
  const std::int32_t* kv_segments;       // [B,S]
  std::int64_t query_length, kv_length;
  const std::int32_t* blocks;     // of a block mask, row-major; null: none
  std::int64_t block_strides[4];  // of batch, head, query block, key block
  std::int64_t query_block, kv_block;
  std::int64_t first_batch, first_head;
  int row_ranges, column_ranges;
  DeviceRange row_range[kMaxRanges];
  DeviceRange column_range[kMaxRanges];
};

}  // namespace annulus::cuda
