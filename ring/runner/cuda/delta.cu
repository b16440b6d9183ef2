#include <cstdint>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/vectors.cuh>

#include "runner/cuda/delta.hpp"

namespace annulus::ring::cuda {
namespace {

using annulus::cuda::for_each_vector;
using annulus::cuda::Pack;
using annulus::cuda::Strided;
using annulus::cuda::VectorGrid;

// A few lanes share a row of a head.
template <class T, int kWidth>
__global__ void delta_kernel(VectorGrid grid, Strided<const T> output, Strided<const T> grad_output,
                             Strided<const float> grad_lse, Strided<float> delta) {
  for_each_vector(grid, [&](unsigned b, unsigned t, unsigned n, int lane, unsigned mask) {
    const auto* const o = reinterpret_cast<const Pack<T, kWidth>*>(output.at(b, t, n));
    const auto* const g = reinterpret_cast<const Pack<T, kWidth>*>(grad_output.at(b, t, n));
    float sum = 0;
    bool is_zero = true;  // then the gradient may be padding, and NaN
    for (int pack = lane; pack < grid.packs; pack += grid.lanes) {
      const Pack<T, kWidth> x = o[pack], y = g[pack];
#pragma unroll
      for (int d = 0; d < kWidth; ++d) {
        const float value = annulus::cuda::to_float(x.at[d]);
        is_zero = is_zero && value == 0;
        sum += value * annulus::cuda::to_float(y.at[d]);
      }
    }
    is_zero = __all_sync(mask, is_zero);
    for (int apart = grid.lanes / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(mask, sum, apart);
    }
    if (lane != 0) return;
    if (is_zero) sum = 0;
    if (grad_lse.data != nullptr) sum -= *grad_lse.at(b, n, t);
    *delta.at(b, n, t) = sum;
  });
}

constexpr unsigned kSinkThreads = 1024;

// One block sums over the rows of one sink, in float64: every thread a fixed share of them, then
// the threads in pairs.
__global__ void sink_gradient_kernel(const float* sinks, std::int64_t per_head, unsigned heads,
                                     unsigned batches, unsigned rows, Strided<const float> lse,
                                     Strided<const float> delta, float* grad_sinks,
                                     std::int64_t head_stride) {
  __shared__ double sums[kSinkThreads];
  const unsigned n = blockIdx.y;  // of `heads` query heads
  const float sink = sinks[n * per_head + blockIdx.x];
  double sum = 0;
  for (unsigned head = n * heads; head < (n + 1) * heads; ++head) {
    for (unsigned b = 0; b < batches; ++b) {
#pragma unroll 4
      for (unsigned t = threadIdx.x; t < rows; t += kSinkThreads) {
        const float of_row = *lse.at(b, head, t);
        if (of_row == -INFINITY) continue;
        sum -= static_cast<double>(expf(sink - of_row)) * *delta.at(b, head, t);
      }
    }
  }
  sums[threadIdx.x] = sum;
  for (unsigned apart = kSinkThreads / 2; apart > 0; apart /= 2) {
    __syncthreads();
    if (threadIdx.x < apart) sums[threadIdx.x] += sums[threadIdx.x + apart];
  }
  if (threadIdx.x == 0) grad_sinks[n * head_stride + blockIdx.x] = static_cast<float>(sums[0]);
}

}  // namespace

void delta(const ConstTensorView& output, const ConstTensorView& grad_output,
           const ConstTensorView& grad_lse, const TensorView& delta, Stream& stream) {
  if (!(output.shape() == grad_output.shape()) || output.dtype() != grad_output.dtype()) {
    throw InternalError("a delta of outputs and gradients that differ in shape or dtype");
  }
  if (delta.elements() == 0) return;
  annulus::cuda::with_type(output.dtype(), [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide =
        annulus::cuda::tiled_by(output, kWide) && annulus::cuda::tiled_by(grad_output, kWide);
    const VectorGrid grid = annulus::cuda::vector_grid(output.shape(), wide ? kWide : 1);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid.blocks());
    config.blockDim = dim3(annulus::cuda::kThreads);
    config.stream = CudaStream::of(stream).raw();
    const Strided<const float> lse = grad_lse.rank() > 0
                                         ? annulus::cuda::strided<const float>(grad_lse)
                                         : Strided<const float>{};
    check_cuda(cudaLaunchKernelEx(&config, wide ? delta_kernel<T, kWide> : delta_kernel<T, 1>, grid,
                                  annulus::cuda::strided<const T>(output),
                                  annulus::cuda::strided<const T>(grad_output), lse,
                                  annulus::cuda::strided<float>(delta)),
               "launching delta");
  });
}

void sink_gradient(const ConstTensorView& sinks, const ConstTensorView& lse,
                   const ConstTensorView& delta, const TensorView& grad_sinks, Stream& stream) {
  if (grad_sinks.elements() == 0) return;
  const auto heads = static_cast<unsigned>(sinks.size(0));
  const unsigned shared = heads == 1 ? static_cast<unsigned>(delta.size(1)) : 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(sinks.size(1)), heads);
  config.blockDim = dim3(kSinkThreads);
  config.stream = CudaStream::of(stream).raw();
  check_cuda(
      cudaLaunchKernelEx(&config, sink_gradient_kernel, sinks.as<float>(), sinks.size(1), shared,
                         static_cast<unsigned>(delta.size(0)), static_cast<unsigned>(delta.size(2)),
                         annulus::cuda::strided<const float>(lse),
                         annulus::cuda::strided<const float>(delta), grad_sinks.as<float>(),
                         grad_sinks.stride(2)),
      "launching the gradient of the sinks");
}

}  // namespace annulus::ring::cuda
