#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "flash/lists/list_input.hpp"

namespace annulus::flash {

/// The number of thread blocks of each of the two kernels that make the lists of `tiles` query
/// tiles.
[[nodiscard]] std::int64_t list_blocks(std::int64_t tiles);

/// Enqueues the two kernels. All arrays are on the device; the output need not be initialised.
[[nodiscard]] cudaError_t launch_lists(const ListInput& input, const ListOutput& output,
                                       cudaStream_t stream);

}  // namespace annulus::flash
