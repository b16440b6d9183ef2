#include <cstdint>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/vectors.cuh>

#include "runner/cuda/delta.hpp"

namespace annulus::ring::cuda {
namespace {

using annulus::cuda::for_each_vector;
using annulus::cuda::Strided;
using annulus::cuda::VectorGrid;

// A few lanes share a row of a head.
template <class T>
__global__ void delta_kernel(VectorGrid grid, Strided<const T> output, Strided<const T> grad_output,
                             Strided<const float> grad_lse, Strided<float> delta, int width) {
  for_each_vector(grid, [&](unsigned b, unsigned t, unsigned n, int lane, unsigned mask) {
    const T* const o = output.at(b, t, n);
    const T* const g = grad_output.at(b, t, n);
    float sum = 0;
    for (int d = lane; d < width; d += grid.lanes) {
      sum += annulus::cuda::to_float(o[d]) * annulus::cuda::to_float(g[d]);
    }
    for (int apart = grid.lanes / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(mask, sum, apart);
    }
    if (lane != 0) return;
    if (grad_lse.data != nullptr) sum -= *grad_lse.at(b, n, t);
    *delta.at(b, n, t) = sum;
  });
}

}  // namespace

void delta(const ConstTensorView& output, const ConstTensorView& grad_output,
           const ConstTensorView& grad_lse, const TensorView& delta, Stream& stream) {
  if (!(output.shape() == grad_output.shape()) || output.dtype() != grad_output.dtype()) {
    throw InternalError("a delta of outputs and gradients that differ in shape or dtype");
  }
  if (delta.elements() == 0) return;
  const VectorGrid grid = annulus::cuda::vector_grid(output.shape(), 1);
  annulus::cuda::with_type(output.dtype(), [&](auto type) {
    using T = decltype(type);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid.blocks());
    config.blockDim = dim3(annulus::cuda::kThreads);
    config.stream = CudaStream::of(stream).raw();
    const Strided<const float> lse = grad_lse.rank() > 0
                                         ? annulus::cuda::strided<const float>(grad_lse)
                                         : Strided<const float>{};
    check_cuda(
        cudaLaunchKernelEx(&config, delta_kernel<T>, grid, annulus::cuda::strided<const T>(output),
                           annulus::cuda::strided<const T>(grad_output), lse,
                           annulus::cuda::strided<float>(delta), static_cast<int>(output.size(3))),
        "launching delta");
  });
}

}  // namespace annulus::ring::cuda
