#include <algorithm>

#include <annulus/core/cuda_stream.hpp>

#include "peer/sum_parts.hpp"

namespace annulus::peer {
namespace {

__global__ void sum_kernel(const float* values, int parts, std::size_t count, float* sum) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t k = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; k < count; k += step) {
    float total = values[k];
    for (int i = 1; i < parts; ++i) total += values[i * count + k];
    sum[k] = total;
  }
}

}  // namespace

void sum_parts(const float* values, int parts, std::size_t count, float* sum, cudaStream_t stream) {
  if (count == 0) return;
  constexpr unsigned kThreads = 256;
  constexpr std::size_t kMostBlocks = 4096;
  const auto blocks =
      static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostBlocks));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, sum_kernel, values, parts, count, sum),
             "launching the sum of a reduce-scatter");
}

}  // namespace annulus::peer
