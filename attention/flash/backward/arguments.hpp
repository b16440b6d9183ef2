#pragma once

#include <cstdint>
#include <cuda.h>

#include "cuda/dropout_arguments.hpp"
#include "cuda/score_arguments.hpp"
#include "flash/arguments.hpp"
#include "flash/backward/tile_mask.hpp"

namespace annulus::flash::backward {

/// A float32 gradient [batch, sequence, head, dim] that a kernel adds to. Without data, it
/// is not wanted.
struct Gradient {
  float* data = nullptr;
  Strides strides;
  std::int32_t dim = 0;
};

/// A float32 value for each row, [batch, head, row].
struct RowValues {
  const float* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;  ///< strides
};

/// A tensor [batch, sequence, head, dim].
struct RowTensor {
  const void* data = nullptr;
  Strides strides;
  std::int32_t dim = 0;
};

/// Powers of two that keep float16 from overflows and subnormal numbers. dO and delta are
/// multiplied by `factor`, so that dS does not overflow: |dS| <= |dP| + |delta| <= dim · max |dO| ·
/// max |V| / (1 − p) + max |delta|. Weights are multiplied by 2^weight_exponent, since those of
/// rows that see more than 16k keys may be subnormal. `inverse` is 1 / (factor ·
/// 2^weight_exponent).
struct OutputScale {
  float factor, inverse;
  std::int32_t weight_exponent;
  std::uint32_t largest[4];  ///< the largest finite |dO|, |V|, |delta| and |LSE|, as float32 bits
  std::uint32_t blocks;      ///< thread blocks that have added to `largest`
};

/// Flags of a query tile, which prepare_rows() writes behind the tile's LSE.
inline constexpr std::int32_t kHiddenRows = 1;  ///< some row sees nothing or does not exist
/// Some LSE or delta is special (see special.cuh), or, with bias or mask, some value of Q or dO.
inline constexpr std::int32_t kSpecialValues = 2;
/// Values that lie behind the LSE of each query tile: its flags, as int32, and padding.
inline constexpr std::int32_t kFlagValues = 4;

/// Memory for dS of wide heads, which the kernel for dK and dV leaves to the kernel for dQ. The
/// parts of a call use it in turn. Its shape, for a part: [(batch, kv head) pairs][query heads of a
/// kv head][query tiles][places].
struct ScoreGradients {
  void* tiles = nullptr;  ///< of 64 x 64 half-precision values; null: dQ is not wanted
  // The size of a full part; the last parts may be smaller.
  std::int32_t pairs = 0, heads = 0, query_tiles = 0, key_tiles = 0;
  /// Tiles of dS that a query tile has room for. If a part has all key tiles, this is at least the
  /// number that a query tile sees, and its tiles follow each other. Otherwise it is key_tiles.
  std::int32_t places = 0;
};

/// Everything that the kernels of a backward call read.
struct Arguments {
  CUtensorMap query, key, value, grad_output;
  /// Gradients that TMA adds to, in boxes of kBoxRows rows and 32 dims.
  CUtensorMap query_sum, key_sum, value_sum;

  /// The bias, or the dense mask if there is no bias, as [batch, row, head, key] in boxes of 64
  /// rows and 128 bytes, and the bias's gradient in the same form. Valid if has_score_boxes.
  /// Broadcast batches and heads have size 1.
  CUtensorMap score_boxes, bias_gradient_boxes;
  bool has_score_boxes = false;

  RowValues lse;    ///< natural
  RowValues delta;  ///< rowsum(dO ∘ O) − dLSE
  /// For each batch, head and query tile, the LSE of its rows, +∞ where a row sees nothing or does
  /// not exist, and kFlagValues more. In units of log2 unless natural_lse.
  float* scaled_lse = nullptr;
  bool natural_lse = false;  ///< for float32 and the general class
  /// For each batch and head, padded_rows values: delta times its scale, 0 where the LSE is +∞.
  float* padded_delta = nullptr;

  std::int32_t batches = 0, heads = 0, heads_per_kv_head = 1;
  std::int32_t rows = 0, columns = 0;
  std::int32_t padded_rows = 0;    ///< a multiple of the query tile
  std::int32_t section_heads = 1;  ///< (batch, kv head) pairs whose work shares L2
  std::int32_t split_items = 0;    ///< the first items, which two blocks share: see Work::split()

  /// For each batch, head and query tile, 1 + the last key tile that has added to its dQ, or 0;
  /// null: key tiles add in any order. next_index follows the array.
  std::int32_t* turns = nullptr;
  std::int32_t* next_index = nullptr;  ///< which work the next block takes
  bool heads_inside = false;           ///< all heads of a query tile before the next: see walk.cuh

  /// Row r sees column c if low <= c − r <= high, r < row_lengths[batch] and c <
  /// column_lengths[batch]. Without arrays, the tensors' lengths hold.
  std::int32_t low = 0, high = 0;
  const std::int32_t* row_lengths = nullptr;
  const std::int32_t* column_lengths = nullptr;
  /// Replaces the band and lengths if it has tiles. The dropout and general classes need it.
  TileMask mask;
  float scale = 1;  ///< of the logits

  bool general = false;  ///< the problem has modifiers that need the general class
  cuda::ScoreArguments scores = {};
  /// The gradient of the bias, indexed like the bias; null: not wanted.
  float* grad_bias = nullptr;
  std::int64_t grad_bias_strides[4] = {};
  RowTensor query_rows, grad_output_rows;  ///< with bias or mask: Q and dO, unscaled

  cuda::DropoutArguments dropout = {};
  float value_scale = 1;  ///< of the gradients of values, and of dO·Vᵀ: 1/(1 − p) with dropout

  float soft_cap = 0;        ///< 0: none; else the logit is soft_cap · tanh(tanh_scale · q·k)
  float tanh_scale = 0;      ///< scale / soft_cap
  float small_tanh[3] = {};  ///< see SmallTanh, of q·k
  float small_tanh_limit = -1;
  std::int32_t accurate_tanh = 0;

  Gradient grad_query, grad_key, grad_value;
  ScoreGradients grad_scores;

  /// Float16 only, otherwise null. Kernels then read a contiguous copy of dO, multiplied by
  /// OutputScale's factor.
  OutputScale* output_scale = nullptr;
  void* scaled_grad_output = nullptr;
};

}  // namespace annulus::flash::backward
