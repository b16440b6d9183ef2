#pragma once

#include <cuda_runtime_api.h>

namespace annulus {

/// Merges nodes of memory operations (writes to and waits for words) that follow each other in a
/// graph without branches, since each node costs a launch about as much as a kernel does.
void merge_memory_operations(cudaGraph_t graph);

}  // namespace annulus
