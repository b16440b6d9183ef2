#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/vectors.cuh>

#include "runner/cuda/sum.hpp"

namespace annulus::ring::cuda {
namespace {

using annulus::cuda::for_each_vector;
using annulus::cuda::Pack;
using annulus::cuda::VectorGrid;

constexpr int kDims = 4;
constexpr int kWide = 4;

struct Array {
  void* data;
  std::int64_t strides[kDims];
  DType dtype;
};

struct Parts {
  Array arrays[kMaximumParts];
  int count;
};

// All threads take the same branch of the switch, so it costs little.
template <class Body>
__device__ void with_device_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float16:
      return body(__half{});
    case DType::bfloat16:
      return body(__nv_bfloat16{});
    default:
      return body(float{});
  }
}

template <int kWidth>
__global__ void __launch_bounds__(annulus::cuda::kThreads)
    sum_kernel(VectorGrid grid, const __grid_constant__ Parts parts,
               const __grid_constant__ Array result) {
  for_each_vector(grid, [&](unsigned i, unsigned j, unsigned k, int lane, unsigned) {
    const auto offset = [&](const Array& array) {
      return i * array.strides[0] + j * array.strides[1] + k * array.strides[2];
    };
    for (int pack = lane; pack < grid.packs; pack += grid.lanes) {
      float total[kWidth] = {};
      for (int p = 0; p < parts.count; ++p) {
        const Array& array = parts.arrays[p];
        const std::int64_t at = offset(array) + pack * kWidth * array.strides[3];
        with_device_type(array.dtype, [&](auto type) {
          using T = decltype(type);
          const auto values =
              *reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(array.data) + at);
#pragma unroll
          for (int d = 0; d < kWidth; ++d) total[d] += annulus::cuda::to_float(values.at[d]);
        });
      }
      const std::int64_t at = offset(result) + pack * kWidth * result.strides[3];
      with_device_type(result.dtype, [&](auto type) {
        using T = decltype(type);
        Pack<T, kWidth> values;
#pragma unroll
        for (int d = 0; d < kWidth; ++d) annulus::cuda::round_to(total[d], values.at[d]);
        *reinterpret_cast<Pack<T, kWidth>*>(static_cast<T*>(result.data) + at) = values;
      });
    }
  });
}

// The shape, padded with leading ones to four dimensions.
template <class View>
Array array_of(const View& view) {
  if (view.dtype() != DType::float16 && view.dtype() != DType::bfloat16 &&
      view.dtype() != DType::float32) {
    throw InternalError("a sum on a GPU of " + std::string(name_of(view.dtype())));
  }
  Array array{const_cast<void*>(static_cast<const void*>(view.data())), {}, view.dtype()};
  for (int dim = 0; dim < view.rank(); ++dim) {
    array.strides[kDims - view.rank() + dim] = view.stride(dim);
  }
  return array;
}

Extents padded_shape(const TensorView& view) {
  std::array<std::int64_t, kDims> sizes{1, 1, 1, 1};
  for (int dim = 0; dim < view.rank(); ++dim) {
    sizes[static_cast<std::size_t>(kDims - view.rank() + dim)] = view.size(dim);
  }
  return {sizes[0], sizes[1], sizes[2], sizes[3]};
}

// True if packs of kWide elements tile every row of the array at aligned addresses.
template <class View>
bool is_wide(const View& view) {
  return view.rank() == kDims && (view.stride(3) == 1 || view.size(3) == 1) &&
         annulus::cuda::tiled_by(view, kWide);
}

}  // namespace

void sum(std::span<const ConstTensorView> parts, const TensorView& result, Stream& stream) {
  if (parts.size() > kMaximumParts || result.rank() > kDims) {
    throw InternalError("a sum with more parts or dimensions than a launch takes");
  }
  if (result.elements() == 0) return;
  Parts from{};
  from.count = static_cast<int>(parts.size());
  bool wide = is_wide(result);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    if (!(parts[p].shape() == result.shape())) throw InternalError("a sum of different shapes");
    from.arrays[p] = array_of(parts[p]);
    wide = wide && is_wide(parts[p]);
  }
  const VectorGrid grid = annulus::cuda::vector_grid(padded_shape(result), wide ? kWide : 1);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks());
  config.blockDim = dim3(annulus::cuda::kThreads);
  config.stream = CudaStream::of(stream).raw();
  check_cuda(cudaLaunchKernelEx(&config, wide ? sum_kernel<kWide> : sum_kernel<1>, grid, from,
                                array_of(result)),
             "launching a sum");
}

}  // namespace annulus::ring::cuda
