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
    bool is_zero = true;  // then the gradient may be NaN from padding
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

}  // namespace

void delta(const ConstTensorView& output, const ConstTensorView& grad_output,
           const ConstTensorView& grad_lse, const TensorView& delta, Stream& stream) {
  if (!(output.shape() == grad_output.shape()) || output.dtype() != grad_output.dtype()) {
    throw InternalError("delta: outputs and gradients differ in shape or dtype");
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

}  // namespace annulus::ring::cuda
