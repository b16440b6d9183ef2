#pragma once

#include <annulus/attention/implementation.hpp>
#include <annulus/core/memory.hpp>

#include "native/matrix_path.hpp"

namespace annulus {

/// Adds the gradients of a block in host memory (FlashAttention-2, Dao 2023, algorithm 2), in a
/// workspace of a few tiles per thread. Tasks of one column tile each sum the gradients of their
/// keys and values; what several of them add to, they add to in their order, so that the bits do
/// not depend on the number of threads. This CPU must support `path`.
void add_native_gradients(const AttentionProblem& problem, const BackwardBlock& block,
                          const Gradients& gradients, const ExecutionContext& context,
                          MatrixPath path, MemoryPool& memory);

}  // namespace annulus
