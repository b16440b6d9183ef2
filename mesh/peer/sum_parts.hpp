#pragma once

#include <cstddef>
#include <cuda_runtime_api.h>

namespace annulus::peer {

/// sum[k] = Σ over i < parts of values[i · count + k], in order of i; float32, device memory.
void sum_parts(const float* values, int parts, std::size_t count, float* sum, cudaStream_t stream);

}  // namespace annulus::peer
