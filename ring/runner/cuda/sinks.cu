#include <cstdint>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/vectors.cuh>

#include "runner/cuda/sinks.hpp"

namespace annulus::ring::cuda {
namespace {

using annulus::cuda::Strided;

struct SinkArguments {
  const float* sinks;
  std::int64_t stride;  // of heads; 0: all share one row
  float* logits;
  void* lse;
  bool wide_lse;   // float64
  float* maximum;  // null: not wanted
  std::int64_t heads, per_head;
};

// A thread for each head. Heads that share their sinks write the same logits.
__global__ void sink_state_kernel(const __grid_constant__ SinkArguments a) {
  const std::int64_t head = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (head >= a.heads) return;
  const float* const sinks = a.sinks + head * a.stride;
  float* const logits = a.logits + (a.stride == 0 ? 0 : head * a.per_head);
  float high = -INFINITY;
  for (std::int64_t m = 0; m < a.per_head; ++m) {
    logits[m] = sinks[m];
    // Unlike fmaxf(), keeps a NaN.
    if (!(sinks[m] <= high)) high = isnan(high) ? high : sinks[m];
  }
  double sum = 0;
  for (std::int64_t m = 0; m < a.per_head && high != -INFINITY; ++m) {
    sum += exp(static_cast<double>(sinks[m]) - high);
  }
  const double lse = high == -INFINITY ? -INFINITY : high + log(sum);
  if (a.wide_lse) {
    static_cast<double*>(a.lse)[head] = lse;
  } else {
    static_cast<float*>(a.lse)[head] = static_cast<float>(lse);
  }
  if (a.maximum != nullptr) a.maximum[head] = high;
}

constexpr unsigned kSinkThreads = 1024;

// One block sums over the rows of one sink, in float64: each thread adds a fixed share of the rows,
// then threads add in pairs.
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

void sink_state(const ConstTensorView& sinks, const TensorView& logits, const TensorView& lse,
                const TensorView& maximum, Stream& stream) {
  constexpr unsigned kThreads = 128;
  const bool shared = logits.size(0) == 1;
  const SinkArguments arguments{
      sinks.as<float>(),
      shared || sinks.rank() == 1 ? 0 : sinks.stride(0),
      logits.as<float>(),
      lse.data(),
      lse.dtype() == DType::float64,
      maximum.rank() > 0 ? maximum.as<float>() : nullptr,
      lse.size(0),
      logits.size(1),
  };
  if (arguments.heads == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((arguments.heads + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = CudaStream::of(stream).raw();
  check_cuda(cudaLaunchKernelEx(&config, sink_state_kernel, arguments),
             "launching the state of the sinks");
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
