#include <cstdint>

#include <annulus/core/cuda_stream.hpp>

#include "runner/cuda/sinks.hpp"

namespace annulus::ring::cuda {
namespace {

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
    high = fmaxf(high, sinks[m]);
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

}  // namespace annulus::ring::cuda
