#pragma once

// Only for sources that are compiled with CUDA. Stream-ordered access to single words, through the
// driver, which is looked up when first needed: a program starts without one.

#include <cstdint>
#include <cuda_runtime_api.h>

namespace annulus::cuda {

/// Writes `value` to `address` (mapped device or host memory, also another device's) after all
/// earlier work of the stream, which everybody who sees the value sees too.
void write_value(cudaStream_t stream, std::uint32_t* address, std::uint32_t value);
/// Holds later work of the stream back until the word at `address` equals `value`.
void wait_value(cudaStream_t stream, std::uint32_t* address, std::uint32_t value);

}  // namespace annulus::cuda
