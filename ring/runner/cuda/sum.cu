#include <algorithm>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <string>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "runner/cuda/sum.hpp"

namespace annulus::ring::cuda {
namespace {

constexpr int kDims = 4;

struct StridedParts {
  const void* data[kMostParts];
  std::int64_t strides[kMostParts][kDims];
  DType dtypes[kMostParts];
  int count;
};

struct StridedResult {
  void* data;
  std::int64_t strides[kDims];
  std::int64_t shape[kDims];
  DType dtype;
};

__device__ float load(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::float16:
      return __half2float(static_cast<const __half*>(data)[at]);
    case DType::bfloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

__device__ void store(void* data, DType dtype, std::int64_t at, float value) {
  switch (dtype) {
    case DType::float16:
      static_cast<__half*>(data)[at] = __float2half_rn(value);
      break;
    case DType::bfloat16:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<float*>(data)[at] = value;
  }
}

__device__ std::int64_t offset_of(const std::int64_t (&index)[kDims],
                                  const std::int64_t (&strides)[kDims]) {
  std::int64_t offset = 0;
  for (int dim = 0; dim < kDims; ++dim) offset += index[dim] * strides[dim];
  return offset;
}

__global__ void sum_kernel(StridedParts parts, StridedResult result, std::int64_t elements) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements;
       i += step) {
    std::int64_t index[kDims];
    std::int64_t rest = i;
    for (int dim = kDims - 1; dim >= 0; --dim) {
      index[dim] = rest % result.shape[dim];
      rest /= result.shape[dim];
    }
    float total = 0;
    for (int p = 0; p < parts.count; ++p) {
      total += load(parts.data[p], parts.dtypes[p], offset_of(index, parts.strides[p]));
    }
    store(result.data, result.dtype, offset_of(index, result.strides), total);
  }
}

// Padded with leading ones to four dimensions.
template <class View>
void set_strides(const View& view, std::int64_t (&strides)[kDims]) {
  std::fill(strides, strides + kDims, 0);
  for (int dim = 0; dim < view.rank(); ++dim) {
    strides[kDims - view.rank() + dim] = view.stride(dim);
  }
}

DType added(DType dtype) {
  if (dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32) return dtype;
  throw InternalError("a sum on a GPU of " + std::string(name_of(dtype)));
}

}  // namespace

void sum(std::span<const ConstTensorView> parts, const TensorView& result, Stream& stream) {
  if (parts.size() > kMostParts || result.rank() > kDims) {
    throw InternalError("a sum of more parts or dimensions than a launch takes");
  }
  const std::int64_t elements = result.elements();
  if (elements == 0) return;
  StridedParts from{};
  from.count = static_cast<int>(parts.size());
  for (std::size_t p = 0; p < parts.size(); ++p) {
    if (!(parts[p].shape() == result.shape())) throw InternalError("a sum of different shapes");
    from.data[p] = parts[p].data();
    from.dtypes[p] = added(parts[p].dtype());
    set_strides(parts[p], from.strides[p]);
  }
  StridedResult to{};
  to.data = result.data();
  to.dtype = added(result.dtype());
  set_strides(result, to.strides);
  std::fill(to.shape, to.shape + kDims, 1);
  for (int dim = 0; dim < result.rank(); ++dim) {
    to.shape[kDims - result.rank() + dim] = result.size(dim);
  }
  constexpr std::int64_t kThreads = 256;
  constexpr std::int64_t kMostBlocks = 8192;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min((elements + kThreads - 1) / kThreads, kMostBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = CudaStream::of(stream).raw();
  check_cuda(cudaLaunchKernelEx(&config, sum_kernel, from, to, elements), "launching a sum");
}

}  // namespace annulus::ring::cuda
