#pragma once

#include <memory>

#include <annulus/attention/implementation.hpp>

#include "native/matrix_path.hpp"

namespace annulus {

/// "native": exact attention on the CPU. A blocked online softmax (Dao 2023, FlashAttention-2,
/// algorithm 1): tiles are multiplied by AMX where the CPU has it, else by OpenBLAS; rows are
/// exponentiated by Highway. Workspace is a few tiles per thread, whatever the sequence length.
/// Sums are float32 for every dtype. The bits of a result depend on the block and the machine, not
/// on the number of threads. Infinities and NaNs reach the rows that see them and no others.
[[nodiscard]] std::unique_ptr<Implementation> make_native_implementation();

/// The kernel of "native" for host memory. This CPU must support `path`.
[[nodiscard]] std::unique_ptr<Kernel> make_native_kernel(const AttentionProblem& problem,
                                                         MatrixPath path, MemoryPool& memory);

}  // namespace annulus
