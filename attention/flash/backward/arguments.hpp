#pragma once

#include <cstdint>
#include <cuda.h>

#include "flash/arguments.hpp"

namespace annulus::flash::backward {

/// Positions of consecutive rows or columns: start + stride·i, the stride positive.
struct Positions {
  std::int32_t start = 0;
  std::int32_t stride = 1;
};

/// A gradient [batch, sequence, head, dim] that a kernel writes. `wide`: float32 rather than the
/// inputs' type. `add`: added to what is there, which must be float32.
struct Gradient {
  void* data = nullptr;
  Strides strides;
  std::int32_t wide = 0;
  std::int32_t add = 0;
};

/// Everything that the kernels of a backward call read.
struct Arguments {
  CUtensorMap query, key, value, grad_output;

  /// For each batch and head, padded_rows values: LSE in units of log2, +∞ where a row sees nothing
  /// or does not exist, and delta = Σ dO∘O − dLSE.
  float* lse = nullptr;
  float* delta = nullptr;
  /// dQ before its scale, in the order in which threads hold it: see the main kernel.
  float* query_sum = nullptr;

  std::int32_t batches = 0, heads = 0, heads_per_kv_head = 1;
  std::int32_t rows = 0, columns = 0;
  std::int32_t padded_rows = 0;    ///< a multiple of the query tile
  std::int32_t section_heads = 1;  ///< (batch, kv head) pairs whose work shares L2

  /// A row sees a column if low <= column position − row position <= high.
  Positions row_positions, column_positions;
  std::int32_t low = 0, high = 0;
  float scale = 1;

  Gradient grad_query, grad_key, grad_value;
};

/// The tensors that the preprocess kernel reads by address.
struct Outputs {
  const void* output = nullptr;
  const void* grad_output = nullptr;
  Strides output_strides, grad_output_strides;
  const float* lse = nullptr;       ///< natural, [batch, head, row], contiguous
  const float* grad_lse = nullptr;  ///< likewise; null: zero
};

}  // namespace annulus::flash::backward
