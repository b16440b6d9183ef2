#include <annulus/core/cuda_stream.hpp>

#include "runner/cuda/call_arguments.hpp"

namespace annulus::ring::cuda {
namespace {

// One block, a thread for each batch.
__global__ void write_kernel(const __grid_constant__ CallArgumentWrite write) {
  const auto batch = static_cast<int>(threadIdx.x);
  if (batch == 0) write.write_key();
  if (batch >= write.batches) return;
  write.write(write.query_lengths, batch);
  write.write(write.kv_lengths, batch);
  write.write(write.offsets, batch);
}

}  // namespace

void write(const CallArgumentWrite& write, Stream& stream) {
  static_assert(sizeof(CallArgumentWrite) <= 4096, "parameters of a kernel");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(CallArgumentWrite::kMaximumBatches);
  config.stream = CudaStream::of(stream).raw();
  check_cuda(cudaLaunchKernelEx(&config, write_kernel, write), "launching the arguments of a call");
}

}  // namespace annulus::ring::cuda
