#pragma once

#include <cstddef>
#include <cuda_runtime_api.h>

// Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch"): a kernel
// that is launched with the attribute may start while the one before it runs, and then waits for
// its end. This hides the time that a launch takes.
namespace annulus::hopper {

/// The next kernel of the stream may start as soon as all thread blocks have called this.
__device__ __forceinline__ void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Waits until the kernel before has ended, and all that it has written is visible.
__device__ __forceinline__ void await_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Launches a kernel that may start early and calls await_kernel_before().
template <class Arguments>
[[nodiscard]] cudaError_t launch_early(void (*kernel)(Arguments), unsigned blocks, int threads,
                                       std::size_t shared_bytes, cudaStream_t stream,
                                       Arguments arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace annulus::hopper
