#include "flash/backward/flash_backward.hpp"

#include <algorithm>

#include <fmt/format.h>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "flash/backward/kernels.hpp"
#include "flash/flash_attention.hpp"
#include "flash/tensor_map.hpp"

namespace annulus::flash::backward {
namespace {

// Queries, dO and sums of dQ of the heads computed at a time should stay in L2 (50 or 60 MB).
constexpr std::int64_t kSectionBytes = std::int64_t{36} << 20;
// Positions and bounds must not overflow when they are subtracted.
constexpr std::int64_t kLargest = std::int64_t{1} << 30;

Strides strides_of(const ConstTensorView& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

Gradient gradient_of(const TensorView& tensor, bool add) {
  return {tensor.data(), strides_of(tensor), tensor.dtype() == DType::float32 ? 1 : 0, add ? 1 : 0};
}

bool fits(const Positions& positions, std::int64_t count) {
  return positions.stride > 0 && positions.start > -kLargest &&
         positions.start + positions.stride * (count + kTileKeys) < kLargest;
}

void check(const BackwardInputs& in, const Band& band, const BackwardResult& result) {
  const Extents& query = in.query.shape();
  const Extents& key = in.key.shape();
  const auto is_gradient = [&](const TensorView& tensor, const Extents& shape) {
    return tensor.shape() == shape && (tensor.dtype() == DType::float32 ||
                                       (tensor.dtype() == in.query.dtype() && !result.add));
  };
  bool good =
      query.rank() == 4 && (query[3] == 64 || query[3] == 128) &&
      (in.query.dtype() == DType::bfloat16 || in.query.dtype() == DType::float16) &&
      key == Extents{query[0], key[1], key[2], query[3]} && in.value.shape() == key && key[2] > 0 &&
      query[2] % key[2] == 0 && in.output.shape() == query && in.grad_output.shape() == query &&
      in.lse.shape() == Extents{query[0], query[2], query[1]} && in.lse.dtype() == DType::float32 &&
      in.lse.is_contiguous() &&
      (!in.grad_lse || (in.grad_lse->shape() == in.lse.shape() &&
                        in.grad_lse->dtype() == DType::float32 && in.grad_lse->is_contiguous())) &&
      is_gradient(result.grad_query, query) && is_gradient(result.grad_key, key) &&
      is_gradient(result.grad_value, key) && fits(band.rows, query[1]) &&
      fits(band.columns, key[1]);
  for (const ConstTensorView* tensor :
       {&in.query, &in.key, &in.value, &in.output, &in.grad_output}) {
    good = good && tensor->dtype() == in.query.dtype() &&
           FlashAttention::layout_obstacle("a tensor", *tensor).empty();
  }
  for (const TensorView* tensor : {&result.grad_query, &result.grad_key, &result.grad_value}) {
    good = good && FlashAttention::layout_obstacle("a gradient", *tensor).empty();
  }
  if (good) return;
  throw InternalError(fmt::format("flash backward: {} query {}, key {}, value {}, LSE {}",
                                  name_of(in.query.dtype()), to_string(query), to_string(key),
                                  to_string(in.value.shape()), to_string(in.lse.shape())));
}

}  // namespace

void FlashBackward::run(const BackwardInputs& in, const Band& band, float scale,
                        const BackwardResult& result, Stream& stream) {
  check(in, band, result);
  const Extents& query = in.query.shape();
  const Extents& key = in.key.shape();
  const auto dim = static_cast<int>(query[3]);
  const std::int64_t tile = tile_queries(dim);
  const std::int64_t padded = (query[1] + tile - 1) / tile * tile;
  const std::int64_t values = query[0] * query[2] * padded;
  const auto current = device_.make_current();
  if (rows_.view().elements() != 2 * values || query_sum_.view().elements() != values * dim) {
    rows_ = Tensor(DType::float32, {2, values}, device_.memory());
    query_sum_ = Tensor(DType::float32, {values, dim}, device_.memory());
  }

  Arguments a;
  a.query = tensor_map(in.query, static_cast<int>(tile));
  a.grad_output = tensor_map(in.grad_output, static_cast<int>(tile));
  a.key = tensor_map(in.key, kTileKeys);
  a.value = tensor_map(in.value, kTileKeys);
  a.lse = static_cast<float*>(rows_.view().data());
  a.delta = a.lse + values;
  a.query_sum = static_cast<float*>(query_sum_.view().data());
  a.batches = static_cast<std::int32_t>(query[0]);
  a.heads = static_cast<std::int32_t>(query[2]);
  a.heads_per_kv_head = static_cast<std::int32_t>(query[2] / key[2]);
  a.rows = static_cast<std::int32_t>(query[1]);
  a.columns = static_cast<std::int32_t>(key[1]);
  a.padded_rows = static_cast<std::int32_t>(padded);
  const std::int64_t head_bytes = padded * dim * 8;
  a.section_heads = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(kSectionBytes / std::max<std::int64_t>(head_bytes, 1), 1,
                               std::max<std::int64_t>(query[0] * key[2], 1)));
  a.row_positions = band.rows;
  a.column_positions = band.columns;
  a.low = static_cast<std::int32_t>(std::max(band.low.value_or(-2 * kLargest), -2 * kLargest));
  a.high =
      static_cast<std::int32_t>(std::min(band.high.value_or(2 * kLargest - 1), 2 * kLargest - 1));
  a.scale = scale;
  a.grad_query = gradient_of(result.grad_query, result.add);
  a.grad_key = gradient_of(result.grad_key, result.add);
  a.grad_value = gradient_of(result.grad_value, result.add);
  Outputs outputs{in.output.data(), in.grad_output.data(), strides_of(in.output),
                  strides_of(in.grad_output), static_cast<const float*>(in.lse.data())};
  if (in.grad_lse) outputs.grad_lse = static_cast<const float*>(in.grad_lse->data());
  check_cuda(launch_backward(a, outputs, dim, in.query.dtype() == DType::float16,
                             CudaStream::of(stream).raw()),
             "launching the backward pass of flash attention");
}

}  // namespace annulus::flash::backward
