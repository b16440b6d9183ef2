#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "flash/arguments.hpp"
#include "flash/decode/key_split.hpp"

// A few query rows against many keys: the time is mostly that of reading the keys and values once.
// Rows of the query heads that share a key/value head are computed together. Under a mask, which is
// one diagonal band and a length per batch, they are computed against the keys that all of them
// see. The others, fewer than there are query rows, are added where the parts are merged.
namespace annulus::flash::decode {

/// Everything of a call.
struct DecodeArguments {
  Operands tensors;
  std::int32_t rows = 0;               ///< query rows times query heads of a key/value head
  std::int32_t heads_per_kv_head = 1;  ///< row r is query row r / heads_per_kv_head
  std::int32_t kv_heads = 1;
  std::int32_t columns = 0;
  std::int32_t value_dim = 0;
  KeySplit split;

  float scale = 1;     ///< of q·k, in units of log 2; with a soft cap, divided by it
  float soft_cap = 0;  ///< in units of log 2; 0: none

  // For each part and row: the sum of the weighted values [part, row, value_dim], the largest logit
  // in units of log 2, and the sum of the weights relative to it.
  float* part_outputs = nullptr;
  float2* part_weights = nullptr;

  Result result;
  std::int32_t wide_output = 0;  ///< float32 rather than the inputs' type
  Result state;                  ///< what the call adds to; no output: nothing
};

/// A compiled kernel that makes the parts, and how it is launched.
struct DecodeKernel {
  const void* function = nullptr;
  int tile_columns = 0;
  int threads = 0;
  std::size_t shared_bytes = 0;

  [[nodiscard]] std::int64_t most_tiles(std::int64_t columns) const {
    return (columns + tile_columns - 1) / tile_columns;
  }
};

/// For head dimensions up to kHeadDim and kValueDim. Both half types of each are compiled together,
/// from kernel.cu.in.
template <int kHeadDim, int kValueDim, bool kHalf>
[[nodiscard]] DecodeKernel decode_kernel();

/// The call's own lengths and offsets, from which its keys follow: in device memory, by batch of
/// the block. A null pointer means the planned ones.
struct CallKeys {
  const BatchKeys* planned = nullptr;  ///< rows, columns, low and high, without an offset of a call
  const std::int32_t* query_lengths = nullptr;
  const std::int32_t* kv_lengths = nullptr;
  const std::int32_t* offsets = nullptr;
  std::int32_t offset = 0;  ///< of all batches, unless there are offsets
  std::int32_t batches = 0;
  std::int32_t rows = 0;     ///< of the block, at positions first_row, first_row + 1, …
  std::int32_t columns = 0;  ///< likewise
  std::int32_t first_row = 0;
  std::int32_t first_column = 0;
  std::int32_t tile_columns = 0;
};

/// Enqueues what writes the keys of a call, one entry for each batch and one behind the last.
[[nodiscard]] cudaError_t launch_call_keys(const CallKeys& call, BatchKeys* keys,
                                           cudaStream_t stream);

/// Enqueues what makes the result out of the parts, always in the same order.
[[nodiscard]] cudaError_t launch_merge(const DecodeArguments& arguments, bool half,
                                       cudaStream_t stream);

}  // namespace annulus::flash::decode
