#pragma once

#include <annulus/attention/softmax_state.hpp>

#include "flash/arguments.hpp"

namespace annulus::flash {

[[nodiscard]] inline Strides strides_of(const ConstTensorView& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

[[nodiscard]] inline Result result_of(const SoftmaxState& state) {
  Result result;
  result.output = state.output.data();
  result.lse = state.lse.data();
  result.output_strides = strides_of(state.output);
  result.lse_batch_stride = state.lse.stride(0);
  result.lse_head_stride = state.lse.stride(1);
  result.lse_row_stride = state.lse.stride(2);
  result.wide_lse = state.lse.dtype() == DType::float64 ? 1 : 0;
  return result;
}

[[nodiscard]] inline Operands operands_of(const ConstTensorView& query, const ConstTensorView& key,
                                          const ConstTensorView& value) {
  return {query.data(),
          key.data(),
          value.data(),
          strides_of(query),
          strides_of(key),
          strides_of(value),
          static_cast<std::int32_t>(query.size(3))};
}

}  // namespace annulus::flash
