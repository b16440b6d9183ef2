#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "flash/lists/list_input.hpp"

namespace annulus::flash {

/// Thread blocks of the two kernels that make the lists of so many query tiles.
[[nodiscard]] std::int64_t list_blocks(std::int64_t tiles);

/// Enqueues them. Everything lies on the device; the output is uninitialised before.
[[nodiscard]] cudaError_t launch_lists(const ListInput& input, const ListOutput& output,
                                       cudaStream_t stream);

}  // namespace annulus::flash
