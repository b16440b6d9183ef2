#pragma once

#include <cstdint>
#include <cuda.h>

#include "cuda/dropout_arguments.hpp"
#include "cuda/score_arguments.hpp"
#include "flash/work.hpp"

namespace annulus::flash {

/// Strides in elements of a tensor [batch, sequence, head, dim].
struct Strides {
  std::int64_t batch = 0, sequence = 0, head = 0;
};

/// Output and LSE of a block.
struct Result {
  void* output = nullptr;
  void* lse = nullptr;
  Strides output_strides;
  std::int64_t lse_batch_stride = 0, lse_head_stride = 0, lse_row_stride = 0;
  std::int32_t wide_lse = 0;  ///< float64 rather than float32
};

inline constexpr int kCounters = 3;

/// With a bias, the values that the softmax takes are exponents of 2 divided by this, so that no
/// finite bias overflows. It is a power of two, so that large values are not rounded either.
inline constexpr float kBiasedExponentScale = 2;

/// Everything of a call.
struct Arguments {
  CUtensorMap query, key, value;  ///< of tensors of half types

  // Work: `tiles` has tiles_per_list entries for each list, longest first; a list for each batch
  // and head that has one of its own.
  const QueryTile* tiles = nullptr;
  const KeySegment* segments = nullptr;
  std::int32_t tiles_per_list = 0;
  std::int32_t tile_columns = 0;
  std::int32_t batch_has_list = 0;  ///< one list per batch rather than one for all
  std::int32_t head_has_list = 0;   ///< one list per query head rather than one for all
  std::int32_t batches = 0;
  std::int32_t heads = 0;
  std::int32_t heads_per_kv_head = 1;
  std::int32_t section_heads = 1;  ///< (batch, head) pairs whose keys and values fit in L2 together
  std::int32_t* counters = nullptr;  ///< kCounters zeros; zeros again when the kernels end
  /// Number and indices of the items that are left to repair(); the number is 0 before and after.
  std::int32_t* repair = nullptr;

  // Keys or ids of the rows, and ids of the columns, of each batch that has lists of its own; null
  // where masked tiles do not need them.
  const RowKeys* row_keys = nullptr;
  const std::int32_t* row_ids = nullptr;
  const std::int32_t* column_ids = nullptr;
  std::int32_t rows = 0;
  std::int32_t columns = 0;

  // For kernels of the general class.
  cuda::ScoreArguments scores = {};
  cuda::DropoutArguments dropout = {};
  /// Factor of the output: 1/(1 − p) with dropout. It is applied at the end, so that a row's
  /// largest weight is exactly 1 in the products.
  float value_scale = 1;

  float scale = 1;     ///< of q·k; with a soft cap, divided by it
  float soft_cap = 0;  ///< 0: none
  // See SmallTanh: its coefficients, and how large |q·k| may be.
  float small_tanh[3] = {};
  float scaled_small_tanh[3] = {};
  float small_tanh_limit = -1;
  std::int32_t accurate_tanh = 0;
  /// Factor that turns the values that the softmax takes into exponents of 2.
  float exponent_scale = 1;
  /// With a bias: factor of q·k in those values; with a soft cap too, factor of the tangents.
  float scale_beside_bias = 1;
  /// The running maximum before the first value. It is finite, also as an exponent, so that values
  /// of −∞ have weight 0 beside it.
  float no_maximum = 0;

  Result result;
  std::int32_t wide_output = 0;  ///< float32 rather than the inputs' type
  /// The state that the call adds to, its output float32; null: none. It may be the result.
  Result state;
  std::int32_t value_dim = 0;
  const std::int32_t* arrived_from = nullptr;  ///< see AttentionBlock
};

/// The tensors of a call, for kernels that read them by address.
struct Operands {
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  Strides query_strides, key_strides, value_strides;
  std::int32_t head_dim = 0;
};

}  // namespace annulus::flash
