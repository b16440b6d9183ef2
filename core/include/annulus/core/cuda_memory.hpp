#pragma once

// Only for sources that are compiled with CUDA.

#include <cstddef>
#include <string>

namespace annulus::cuda {

/// cudaMalloc on the current device. Null if no memory is left; throws CudaError.
[[nodiscard]] void* allocate(std::size_t bytes);
/// "3.2 GiB of the device's 139.8 GiB are free".
[[nodiscard]] std::string memory_state(int device);
/// "0000:1b:00.0": the same in every process of a node, independent of CUDA_VISIBLE_DEVICES.
[[nodiscard]] std::string bus_id(int device);

}  // namespace annulus::cuda
